-- Takes all permits that are free; if they are fewer than none, puts them back to
-- none, as Java's drainPermits does.
-- KEYS, ARGV[1..4]  see pool.lua
-- Reply: how many there were.

local before = pool.before()
if before then
	return before
end
local free = pool.free() or 0
if free == 0 then
	return {0}
end
pool.note({free})
pool.change(-free) -- which keeps the time to live
return {free}

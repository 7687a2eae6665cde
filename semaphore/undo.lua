-- Gives back what an acquisition has taken of which nothing is known, and sees to it
-- that it takes nothing if it arrives later. It has the number of that acquisition.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5..]         the permits of each of its requests
-- Reply: how many permits were given back.

local before = pool.before()
if before and (before[1] or -1) < 0 then
	return {0} -- this has run before
end
local taken = 0
for i = 1, before and before[1] or 0 do
	taken = taken + ARGV[4 + i]
end
-- Whoever has deleted the semaphore meanwhile does not want it back.
if not pool.free() then
	taken = 0
end
pool.begin_return()
pool.note({-1})
if taken > 0 then
	pool.tell(pool.change(taken))
end
return {taken}

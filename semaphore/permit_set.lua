-- Sets how many permits there are in all, taken and free.
-- KEYS, ARGV[1..4]  see pool.lua, permits.lua
-- ARGV[5]           how many
-- Reply: 1 if that is a change, else 0.

local before = pool.before()
if before then
	return before
end
local wanted = tonumber(ARGV[5])
local free = pool.free()
local change = wanted - (free or 0) - redis.call('ZCARD', KEYS[5])
if free and change == 0 then
	return {0}
end
pool.note({1})
-- What was told is as Redisson has it; nothing, if nobody can be served.
if pool.change(change) > 0 then
	pool.tell(wanted)
end
return {1}

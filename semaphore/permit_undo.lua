-- Gives back the permits of an acquisition of which nothing is known, and sees to it
-- that it takes none if it arrives later. It has the number of that acquisition.
-- KEYS, ARGV[1..4]  see pool.lua, permits.lua
-- ARGV[5..]         its permits
-- Reply: how many permits were given back.

local before = pool.before()
if before and (before[1] or -1) < 0 then
	return {0} -- this has run before
end
-- Whoever has deleted the semaphore meanwhile does not want it back.
local there = pool.free()
pool.begin_return()
redis.call('ZREM', KEYS[5], '') -- a user who may not must not do the rest
pool.note({-1})
-- They are known by themselves, should the ticket be lost.
local ids = {}
for i = 5, #ARGV do
	ids[#ids + 1] = ARGV[i]
end
local dropped = permits.drop(KEYS[5], ids)
if dropped > 0 and there then
	pool.tell(pool.change(dropped))
end
return {dropped}

-- Releases a claim. It can be repeated.
-- KEYS[1..5]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     claim
-- ARGV[7..]   claims that leave the queue, see confirm.lua
-- Reply: 2 plus the number of receivers if the lock is free; 0 if the claim does not hold
-- the lock, and then its queue position is removed.

local free, not_held = 2, 0

local held = redis.call('HEXISTS', KEYS[1], ARGV[6]) == 1
if held and redis.call('EXISTS', unpack(KEYS, 2)) == 0 then
	redis.call('DEL', KEYS[1]) -- no waiters
	return free
end
local q = positions.open(1, ARGV[1], ARGV[2])
if #ARGV > 6 then
	positions.leave(q, unpack(ARGV, 7))
end
if held then
	positions.free(q)
else
	-- An attempt with an unknown outcome may have enqueued it.
	positions.leave(q, ARGV[6])
end
positions.refresh(q, {})
local receivers = positions.close(q, ARGV[3], ARGV[4], ARGV[5])
return held and free + receivers or not_held

-- Releases a claim, or passes the lock on to another claim if that is first in the queue.
-- It can be repeated.
-- KEYS[1..4]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     claim
-- ARGV[7]     claim to pass the lock on to, or ''
-- ARGV[8]     lease of that claim in ms
-- Reply: 2 plus the number of receivers if the lock is free; 0 if the claim does not hold
-- the lock, and then its queue position is removed unless ARGV[7] is set; -2 passed on.

local free, not_held, passed = 2, 0, -2

local from, to = ARGV[6], ARGV[7]
local held = redis.call('HEXISTS', KEYS[1], from) == 1
if held and to == '' and redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) == 0 then
	redis.call('DEL', KEYS[1]) -- no waiters
	return free
end
local q = positions.open(1, ARGV[1], ARGV[2])
if not held and to ~= '' then
	if redis.call('HEXISTS', KEYS[1], to) == 0 then
		return not_held
	end
	-- The same request was delivered twice, and the lease may have been extended since.
	if q.ttl < tonumber(ARGV[8]) then
		redis.call('PEXPIRE', KEYS[1], ARGV[8])
	end
	return passed
end

positions.purge(q)
if not held then
	-- An attempt with an unknown outcome may have enqueued it.
	positions.leave(q, from)
	positions.close(q, ARGV[3], ARGV[4], ARGV[5])
	return not_held
end
if to ~= '' then
	if positions.evicted(q, to) then
		positions.restore(q, to)
	end
	local head = positions.head(q)
	if not head or head == to then
		redis.call('HSET', KEYS[1], to, 1)
		redis.call('HDEL', KEYS[1], from)
		redis.call('PEXPIRE', KEYS[1], ARGV[8])
		positions.taken(q, ARGV[8])
		positions.leave(q, to)
		positions.close(q, ARGV[3], ARGV[4], ARGV[5])
		return passed
	end
end
redis.call('DEL', KEYS[1])
positions.freed(q)
return free + positions.close(q, ARGV[3], ARGV[4], ARGV[5])

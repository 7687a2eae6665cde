-- Gives the lock back for an owner made for one acquisition, or passes it on to
-- another such owner if that one is first. It can be repeated.
-- KEYS[1..4]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     owner
-- ARGV[7]     owner to pass it on to, or ''
-- ARGV[8]     lease of that one in ms
-- Reply: free, 2 plus the number of subscribers told; 0 not held, and a place is
-- given up if there is nobody to pass the lock on to; -1 held more than once, and
-- nothing was done; -2 passed on.

local free, not_held, shared, passed = 2, 0, -1, -2

local from, to = ARGV[6], ARGV[7]
local count = redis.call('HGET', KEYS[1], from)
if count == '1' and to == '' and redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) == 0 then
	redis.call('DEL', KEYS[1]) -- nobody waits
	return free
end
local q = places.open(1, ARGV[1])
if count and count ~= '1' then
	return shared
end
if not count and to ~= '' then
	if redis.call('HEXISTS', KEYS[1], to) == 0 then
		return not_held
	end
	-- Nobody else has the second owner, so this is the same request delivered
	-- twice, and the lease may have been extended since.
	if q.ttl < tonumber(ARGV[8]) then
		redis.call('PEXPIRE', KEYS[1], ARGV[8])
	end
	return passed
end

places.purge(q)
if not count then
	-- An attempt of which nothing is known may have come to a place.
	places.leave(q, from)
	places.close(q, ARGV[3], ARGV[4], ARGV[5])
	return not_held
end
if to ~= '' then
	if places.evicted(q, to) then
		places.restore(q, to, ARGV[2])
	end
	local head = places.head(q)
	if not head or head == to then
		redis.call('HSET', KEYS[1], to, 1)
		redis.call('HDEL', KEYS[1], from)
		redis.call('PEXPIRE', KEYS[1], ARGV[8])
		places.taken(q, ARGV[8])
		places.leave(q, to)
		places.close(q, ARGV[3], ARGV[4], ARGV[5])
		return passed
	end
end
redis.call('DEL', KEYS[1])
places.freed(q)
return free + places.close(q, ARGV[3], ARGV[4], ARGV[5])

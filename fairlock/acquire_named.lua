-- Takes the lock, or takes it once more, for an owner that the caller named, or
-- gives it a place.
-- KEYS[1..4]  as acquire.lua
-- KEYS[5]     ticket: 'held' for as long as this hold has, and then what became of
--             it, so that each of its requests counts once and for no other hold
-- ARGV[1..8]  as acquire.lua, of one owner
-- ARGV[9]     1 if the owner may hold more than once
-- Reply: as acquire.lua.

local owner, lease, waits = ARGV[6], ARGV[7], ARGV[8] == '1'

local ticket = redis.call('GET', KEYS[5])
if ticket and ticket ~= 'held' then -- released since
	return places.refused()
end
local holds = redis.call('HEXISTS', KEYS[1], owner) == 1
-- Else an attempt was delivered twice: this one, or an earlier one of the same
-- wait. The caller counts the lease from this one.
local again = ticket == 'held' and holds
if holds and not again and ARGV[9] ~= '1' then
	return places.reentered
end

local q = places.open(1, ARGV[1])
places.purge(q)
if waits and places.evicted(q, owner) then
	places.restore(q, owner, ARGV[2])
end
local head = places.head(q)
local answer
if holds or q.free and (not head or head == owner) then
	-- What can fail comes first, and leaves nothing.
	redis.call('SET', KEYS[5], 'held', 'PX', lease)
	if not again then
		redis.call('HINCRBY', KEYS[1], owner, 1)
	end
	-- Neither re-entry nor a repetition cuts short what the owner has asked for
	-- before.
	if q.ttl < tonumber(lease) then
		local expires = redis.pcall('PEXPIRE', KEYS[1], lease)
		if expires ~= 1 then -- a user without that right must not take it for ever
			redis.call('DEL', KEYS[5])
			if redis.call('HINCRBY', KEYS[1], owner, -1) == 0 then
				redis.call('DEL', KEYS[1])
			end
			return expires
		end
		places.taken(q, lease)
	end
	places.leave(q, owner)
	answer = places.acquired
elseif waits then
	answer = places.wait(q, owner, ARGV[2])
else
	answer = places.refused(q)
end
places.close(q, ARGV[3], ARGV[4], ARGV[5])
return answer

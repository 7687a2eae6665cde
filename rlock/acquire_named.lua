-- Takes the lock, or takes it once more, for an owner that the caller named.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket: 'held' for as long as this hold has, and then what became of
--          it, so that each of its requests counts once and for no other hold
-- KEYS[3]  fencing counter, for a fenced lock only
-- ARGV[1]  lease in ms
-- ARGV[2]  owner
-- ARGV[3]  1 if the owner may hold more than once
-- Reply: as acquire.lua; nil if the owner holds and may not hold again.

local ticket = redis.call('GET', KEYS[2])
if ticket and ticket ~= 'held' then -- released since
	return -1
end
local token
-- Else an attempt was delivered twice: this one, or an earlier one of the same
-- wait. The caller counts the lease from this one.
local again = ticket == 'held' and redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1
if again then
	token = KEYS[3] and tonumber(redis.call('GET', KEYS[3])) or 0
else
	if redis.call('EXISTS', KEYS[1]) == 1 then
		if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
			return -2 - redis.call('PTTL', KEYS[1])
		end
		if ARGV[3] ~= '1' then
			return false
		end
	end
	-- What can fail comes first, and leaves nothing.
	token = KEYS[3] and redis.call('INCR', KEYS[3]) or 0
end
redis.call('SET', KEYS[2], 'held', 'PX', ARGV[1])
if not again then
	redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
end
-- Neither re-entry nor a repetition cuts short what the owner has asked for
-- before.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then
	local expires = redis.pcall('PEXPIRE', KEYS[1], ARGV[1])
	if expires ~= 1 then -- a user without that right must not take it for ever
		redis.call('DEL', KEYS[2])
		if redis.call('HINCRBY', KEYS[1], ARGV[2], -1) == 0 then
			redis.call('DEL', KEYS[1])
		end
		return expires
	end
end
return token

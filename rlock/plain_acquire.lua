-- Takes a plain lock.
-- KEYS[1]  lock string
-- ARGV[1]  lease in ms
-- ARGV[2]  value: of this acquisition and no other
-- ARGV[3]  owner, with which the values of all its acquisitions begin
-- Reply: acquired, 0; taken, -2 - PTTL, which is negative also when the key has no
-- expiry (PTTL -1); nil if the owner holds the lock by another acquisition.

if redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[1]) then
	return 0
end
local value = redis.call('GET', KEYS[1])
if value == ARGV[2] then
	-- An attempt was delivered twice: this one, or an earlier one of the same wait.
	-- The caller counts the lease from this one.
	if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then
		redis.call('PEXPIRE', KEYS[1], ARGV[1])
	end
	return 0
end
if value == ARGV[3] or string.sub(value, 1, #ARGV[3] + 1) == ARGV[3] .. ':' then
	return false
end
return -2 - redis.call('PTTL', KEYS[1])

-- Takes a plain lock.
-- KEYS[1]  lock string
-- ARGV[1]  lease in ms
-- ARGV[2]  claim
-- Reply: acquired, 0; taken, a list of PTTL, which is -1 if the key has no expiry.

if redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[1]) then
	return 0
end
local left = redis.call('PTTL', KEYS[1])
if redis.call('GET', KEYS[1]) ~= ARGV[2] then
	return {left}
end
-- An attempt was delivered twice: this one, or an earlier one of the same wait. The caller
-- counts the lease from this one.
if left < tonumber(ARGV[1]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 0

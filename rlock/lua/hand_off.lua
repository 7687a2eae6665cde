-- Passes the lock from one claim to the next without letting go of it.
-- KEYS[1]  lock hash
-- KEYS[2]  fencing counter, for a fenced lock only
-- ARGV[1]  claim that has it
-- ARGV[2]  claim that gets it
-- ARGV[3]  lease in ms
-- Reply: passed on, the fencing token or 0; nil if the first claim does not stand, and
-- nothing was done.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
	-- The counter comes first: it alone can fail, and then nothing has moved.
	local token = KEYS[2] and redis.call('INCR', KEYS[2]) or 0
	redis.call('HSET', KEYS[1], ARGV[2], 1)
	redis.call('HDEL', KEYS[1], ARGV[1])
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
	return token
end
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
	return false
end
-- This is the same request delivered twice, and the lease may have been extended since.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return KEYS[2] and tonumber(redis.call('GET', KEYS[2])) or 0

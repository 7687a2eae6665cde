-- Passes the lock from one owner to the next without letting go of it.
-- KEYS[1]  lock hash
-- KEYS[2]  fencing counter, for a fenced lock only
-- ARGV[1]  owner who has it
-- ARGV[2]  owner who gets it
-- ARGV[3]  lease in ms
-- Reply: passed on, the fencing token or 0; nil if the first owner does not
-- hold it exactly once, and nothing was done.

if redis.call('HGET', KEYS[1], ARGV[1]) ~= '1' then
	return false
end
-- The counter comes first: it alone can fail, and then nothing has moved.
local token = KEYS[2] and redis.call('INCR', KEYS[2]) or 0
redis.call('HSET', KEYS[1], ARGV[2], 1)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return token

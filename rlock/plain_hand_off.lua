-- Passes a plain lock from one acquisition to the next without letting go of it.
-- KEYS[1]  lock string
-- ARGV[1]  value that it has
-- ARGV[2]  value that it gets
-- ARGV[3]  lease in ms
-- Reply: 1; 0 if it had another value, and nothing was done.

local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
	return 1
end
if value ~= ARGV[2] then
	return 0
end
-- Nobody else has the second value, so this is the same request delivered twice,
-- and the lease may have been extended since.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1

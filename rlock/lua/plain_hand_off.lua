-- Passes a plain lock from one claim to the next without letting go of it.
-- KEYS[1]  lock string
-- ARGV[1]  claim that has it
-- ARGV[2]  claim that gets it
-- ARGV[3]  lease in ms
-- Reply: 1; 0 if the first claim does not stand, and nothing was done.

local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
	return 1
end
if value ~= ARGV[2] then
	return 0
end
-- This is the same request delivered twice, and the lease may have been extended since.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1

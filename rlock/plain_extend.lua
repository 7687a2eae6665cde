-- Makes a hold of a plain lock last at least a lease from now.
-- KEYS[1]  lock string
-- ARGV[1]  value
-- ARGV[2]  lease in ms
-- Reply: 1; 0 if the lock has another value.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
	return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1

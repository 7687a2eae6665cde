-- Makes a claim last at least a lease from now.
-- KEYS[1]  lock hash
-- ARGV[1]  claim
-- ARGV[2]  lease in ms
-- Reply: 1; 0 if the claim does not stand.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
	return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1

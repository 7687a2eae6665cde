-- Makes a hold last at least a lease from now.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket, for an owner that the caller named only
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- Reply: 1; 0 if the owner does not hold the lock.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 or KEYS[2] and redis.call('GET', KEYS[2]) ~= 'held' then
	return 0
end
for _, key in ipairs(KEYS) do
	if redis.call('PTTL', key) < tonumber(ARGV[2]) then
		redis.call('PEXPIRE', key, ARGV[2])
	end
end
return 1

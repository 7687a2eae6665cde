-- What Redisson does to give one permit back that expires.
-- KEYS[1]  permits, KEYS[2] permits that are taken
-- ARGV[1]  the time by its own clock, in ms
-- ARGV[2]  channel
-- ARGV[3]  permit
-- Reply: 1; 0 if it is not taken, or has expired.
local at = redis.call('ZSCORE', KEYS[2], ARGV[3])
if not at then
	return {0}
end
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('PUBLISH', ARGV[2], redis.call('INCRBY', KEYS[1], 1))
return {tonumber(at) > tonumber(ARGV[1]) and 1 or 0}

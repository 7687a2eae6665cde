-- What Redisson does to take permits that expire.
-- KEYS[1]  permits, KEYS[2] permits that are taken
-- ARGV[1]  the time by its own clock, in ms
-- ARGV[2]  when they expire, by that clock
-- ARGV[3]  channel
-- ARGV[4..]  permits
-- Reply: 1 if it has them, else 0.
local n = #ARGV - 3
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], 0, ARGV[1], 'LIMIT', 0, n)
if #expired > 0 then
	redis.call('ZREM', KEYS[2], unpack(expired))
	local free = redis.call('INCRBY', KEYS[1], #expired)
	if free > 0 then
		redis.call('PUBLISH', ARGV[3], free)
	end
end
local free = redis.call('GET', KEYS[1])
if not free or tonumber(free) < n then
	return {0}
end
redis.call('DECRBY', KEYS[1], n)
for i = 4, #ARGV do
	redis.call('ZADD', KEYS[2], ARGV[2], ARGV[i])
end
local ttl = redis.call('PTTL', KEYS[1])
if ttl > 0 then
	redis.call('PEXPIRE', KEYS[2], ttl)
end
return {1}

-- What Redisson does whenever it is asked about permits that expire.
-- KEYS[1]  permits, KEYS[2] permits that are taken
-- ARGV[1]  the time by its own clock, in ms
-- ARGV[2]  channel
-- Reply: how many are free.
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], 0, ARGV[1])
if #expired > 0 then
	redis.call('ZREM', KEYS[2], unpack(expired))
	local free = redis.call('INCRBY', KEYS[1], #expired)
	if free > 0 then
		redis.call('PUBLISH', ARGV[2], free)
	end
	return {free}
end
return {tonumber(redis.call('GET', KEYS[1]) or 0)}

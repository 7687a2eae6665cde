-- What Redisson does to take all permits of a semaphore.
-- KEYS[1]  permits
-- Reply: how many there were.
local free = redis.call('GET', KEYS[1])
if not free then
	return {0}
end
redis.call('SET', KEYS[1], 0)
return {tonumber(free)}

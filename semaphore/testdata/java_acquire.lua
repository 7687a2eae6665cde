-- What Redisson does to take permits of a semaphore.
-- KEYS[1]  permits
-- ARGV[1]  how many
-- Reply: 1 if it has them, else 0.
local free = redis.call('GET', KEYS[1])
if free and tonumber(free) >= tonumber(ARGV[1]) then
	redis.call('DECRBY', KEYS[1], ARGV[1])
	return {1}
end
return {0}

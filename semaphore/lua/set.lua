-- Creates a semaphore that does not exist.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5]           number of permits
-- ARGV[6]           time to live of the semaphore in ms, '' for none
-- Reply: 1 if it was created, else 0.

local cached = pool.cached()
if cached then
	return cached
end
if redis.call('EXISTS', KEYS[1]) == 1 then
	return {0}
end
pool.cache({1})
if ARGV[6] == '' then
	redis.call('SET', KEYS[1], ARGV[5])
else
	redis.call('SET', KEYS[1], ARGV[5], 'PX', ARGV[6])
end
pool.publish(tonumber(ARGV[5]))
return {1}

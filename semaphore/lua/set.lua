-- Creates a semaphore that does not exist.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7]           number of permits
-- ARGV[8]           time to live of the semaphore in ms, '' for none
-- Reply: 1 if it was created, else 0.

local cached = pool.cached()
if cached then
	return cached
end
if pool.free() then
	return pool.cache({0})
end
pool.created()
pool.cache({1})
if ARGV[8] == '' then
	redis.call('SET', KEYS[1], ARGV[7])
else
	redis.call('SET', KEYS[1], ARGV[7], 'PX', ARGV[8])
end
pool.publish(tonumber(ARGV[7]))
return {1}

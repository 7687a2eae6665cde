-- Makes a semaphore if there is none.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5]           permits
-- ARGV[6]           after how many ms the semaphore goes, '' for never
-- Reply: 1 if it was made, else 0.

local before = pool.before()
if before then
	return before
end
if redis.call('EXISTS', KEYS[1]) == 1 then
	return {0}
end
pool.note({1})
if ARGV[6] == '' then
	redis.call('SET', KEYS[1], ARGV[5])
else
	redis.call('SET', KEYS[1], ARGV[5], 'PX', ARGV[6])
end
pool.tell(tonumber(ARGV[5]))
return {1}

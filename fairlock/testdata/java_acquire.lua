-- What Redisson does to acquire a fair lock.
-- KEYS     lock, list, deadlines
-- ARGV[1]  lease in ms
-- ARGV[2]  owner
-- ARGV[3]  its wait in ms
-- ARGV[4]  the time by its own clock, in ms
-- ARGV[5]  1 if it waits
-- Reply: nil if the lock was acquired, else how long to sleep at most, in ms.
local me, wait, now = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function evict()
	while true do
		local first = redis.call('LINDEX', KEYS[2], 0)
		local deadline = first and redis.call('ZSCORE', KEYS[3], first)
		if not deadline or tonumber(deadline) > now then
			return first
		end
		redis.call('ZREM', KEYS[3], first)
		redis.call('LPOP', KEYS[2])
	end
end

local first = evict()
if redis.call('EXISTS', KEYS[1]) == 0 and (not first or first == me) then
	redis.call('LPOP', KEYS[2])
	redis.call('ZREM', KEYS[3], me)
	for _, other in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
		redis.call('ZINCRBY', KEYS[3], -wait, other)
	end
	redis.call('HSET', KEYS[1], me, 1)
	redis.call('PEXPIRE', KEYS[1], ARGV[1])
	return false
end
if redis.call('HEXISTS', KEYS[1], me) == 1 then
	redis.call('HINCRBY', KEYS[1], me, 1)
	redis.call('PEXPIRE', KEYS[1], ARGV[1])
	return false
end
if ARGV[5] ~= '1' then
	return 1
end
local ttl = redis.call('PTTL', KEYS[1])
if redis.call('ZSCORE', KEYS[3], me) then
	return math.max(0, ttl)
end
local last = redis.call('LINDEX', KEYS[2], -1)
local deadline = last and last ~= me and redis.call('ZSCORE', KEYS[3], last)
if deadline then
	ttl = tonumber(deadline) - now
end
if redis.call('ZADD', KEYS[3], ttl + wait + now, me) == 1 then
	redis.call('RPUSH', KEYS[2], me)
end
return ttl

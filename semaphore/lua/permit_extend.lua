-- Changes the lease of a permit. Idempotent.
-- KEYS[1]  number of free permits, KEYS[2] acquired permits
-- ARGV[1]  the permit
-- ARGV[2]  ms from now, or 'forever'
-- ARGV[3]  'least' to only lengthen the lease, 'just' to set it
-- Reply: 1; 0 if the permit is not acquired or has expired.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if at <= now then
	return 0
end
local deadline = permits.deadline(ARGV[2], now)
if ARGV[3] == 'just' or deadline > at then
	-- A server out of memory rejects only the first write of a script: this one needs no
	-- memory and has no effect.
	redis.pcall('ZREM', KEYS[2], '')
	redis.call('ZADD', KEYS[2], 'XX', deadline, ARGV[1])
end
return 1

-- Changes when a permit expires. It can be repeated.
-- KEYS[1]  permits that are free, KEYS[2] permits that are taken
-- ARGV[1]  the permit
-- ARGV[2]  ms from now, or 'forever'
-- ARGV[3]  'least' if it is to last no less than that, 'just' if no more either
-- Reply: 1; 0 if the permit is not taken, or has expired.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if at <= now then
	return 0
end
local deadline = permits.deadline(ARGV[2], now)
if ARGV[3] == 'just' or deadline > at then
	-- A server out of memory would refuse the ZADD; not so after another write, though
	-- that changes nothing.
	redis.pcall('ZREM', KEYS[2], '')
	redis.call('ZADD', KEYS[2], 'XX', deadline, ARGV[1])
end
return 1

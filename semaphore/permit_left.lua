-- Tells how many ms a permit has left. It writes nothing.
-- KEYS[1]  permits that are free, KEYS[2] permits that are taken
-- ARGV[1]  the permit
-- Reply: ms; -1 if it never expires; -2 if it is not taken, or has expired.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if at <= now then
	return -2
end
return at >= permits.never and -1 or at - now

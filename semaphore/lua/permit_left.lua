-- Returns the remaining lease of a permit. Read-only.
-- KEYS[1]  number of free permits, KEYS[2] acquired permits
-- ARGV[1]  the permit
-- Reply: ms; -1 if it never expires; -2 if it is not acquired or has expired.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if at <= now then
	return -2
end
return at >= permits.no_expiry and -1 or at - now - 1 -- now is rounded down

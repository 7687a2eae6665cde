-- Returns the numbers of permits. Read-only.
-- KEYS[1]  number of free permits
-- KEYS[2]  acquired permits
-- Reply: free, acquired; expired permits count as free.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local free = redis.call('GET', KEYS[1]) or '0'
if not tonumber(free) then
	return redis.error_reply('ERR value is not an integer or out of range')
end
local expired = redis.call('ZCOUNT', KEYS[2], '-inf', now)
return {free + expired, redis.call('ZCARD', KEYS[2]) - expired}

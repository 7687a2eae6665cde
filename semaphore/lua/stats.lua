-- Returns the numbers of permits and of waiting clients. Read-only.
-- KEYS[1]  number of free permits
-- KEYS[2]  heartbeats: see pool.lua
-- KEYS[3]  acquired permits, of a permit semaphore
-- Reply: free, acquired, waiting. Expired permits count as free.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local free = redis.call('GET', KEYS[1]) or '0'
if not tonumber(free) then
	return redis.error_reply('ERR value is not an integer or out of range')
end
local waiting = redis.call('ZCOUNT', KEYS[2], '(' .. now, '+inf')
if not KEYS[3] then
	return {tonumber(free), 0, waiting}
end
local expired = redis.call('ZCOUNT', KEYS[3], '-inf', now)
return {free + expired, redis.call('ZCARD', KEYS[3]) - expired, waiting}

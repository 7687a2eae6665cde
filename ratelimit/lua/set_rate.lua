-- Sets the configuration. Permits that were acquired before count for the new one.
-- KEYS        see limiter.lua
-- ARGV[1]     publish command
-- ARGV[2]     channel
-- ARGV[3..6]  rate, interval, type and keepAliveTime
-- Reply: 1.

local call = redis.call

local old = call('HGET', KEYS[1], 'type')
call('HSET', KEYS[1], 'rate', ARGV[3], 'interval', ARGV[4], 'type', ARGV[5], 'keepAliveTime', ARGV[6])
if old and old ~= ARGV[5] then
	call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
end
local failed = limiter.load()
if failed then
	return failed
end
limiter.recount()
limiter.publish(ARGV[1], ARGV[2])
return {1}

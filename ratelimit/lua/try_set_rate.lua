-- Sets the configuration if there is none.
-- KEYS[1]     configuration
-- ARGV[1]     publish command
-- ARGV[2]     channel
-- ARGV[3..6]  rate, interval, type and keepAliveTime
-- ARGV[7]     1 if this request may have run before
-- Reply: 1 if this request has set it, or may have, else 0.

local call = redis.call

local old = call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime')
if old[1] and old[2] and old[3] then
	local same = old[1] == ARGV[3] and old[2] == ARGV[4] and old[3] == ARGV[5] and old[4] == ARGV[6]
	return {ARGV[7] == '1' and same and 1 or 0}
end
-- Redisson does not replace the fields of an incomplete configuration either.
for i, field in ipairs({'rate', 'interval', 'keepAliveTime', 'type'}) do
	call('HSETNX', KEYS[1], field, ARGV[({3, 4, 6, 5})[i]])
end
if tonumber(ARGV[6]) > 0 then
	call('PEXPIRE', KEYS[1], ARGV[6])
end
redis.pcall(ARGV[1], ARGV[2], '1')
return {1}

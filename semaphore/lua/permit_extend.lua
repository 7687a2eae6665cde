-- Changes the lease of permits, of all or none. Idempotent.
-- KEYS[1]   number of free permits, KEYS[2] acquired permits
-- ARGV[1]   ms from now, or 'forever'
-- ARGV[2]   'least' to only lengthen the lease, 'just' to set it
-- ARGV[3..] the permits
-- Reply: 1; 0 if one of the permits is not acquired or has expired.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline = permits.deadline(ARGV[1], now)
local changed = {}
for i = 3, #ARGV do
	local at = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[i]) or 0)
	if at <= now then
		return 0
	end
	if ARGV[2] == 'just' or deadline > at then
		changed[#changed + 1] = ARGV[i]
	end
end
if #changed > 0 then
	-- A server out of memory rejects only the first write of a script: this one needs no
	-- memory and has no effect.
	redis.pcall('ZREM', KEYS[2], '')
end
for _, id in ipairs(changed) do
	redis.call('ZADD', KEYS[2], 'XX', deadline, id)
end
return 1

-- What Redisson does to release a fair lock.
-- KEYS     lock, list, deadlines
-- ARGV[1]  lease in ms
-- ARGV[2]  owner
-- ARGV[3]  the time by its own clock, in ms
-- ARGV[4]  channel of the lock
-- Reply: 1 free, 0 still held, nil not held by the owner.
local first
while true do
	first = redis.call('LINDEX', KEYS[2], 0)
	local deadline = first and redis.call('ZSCORE', KEYS[3], first)
	if not deadline or tonumber(deadline) > tonumber(ARGV[3]) then
		break
	end
	redis.call('ZREM', KEYS[3], first)
	redis.call('LPOP', KEYS[2])
end
local function tell()
	if first then
		redis.call('PUBLISH', ARGV[4] .. ':' .. first, '0')
	end
	return 1
end
if redis.call('EXISTS', KEYS[1]) == 0 then
	return tell()
end
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
	return false
end
if redis.call('HINCRBY', KEYS[1], ARGV[2], -1) > 0 then
	redis.call('PEXPIRE', KEYS[1], ARGV[1])
	return 0
end
redis.call('DEL', KEYS[1])
return tell()

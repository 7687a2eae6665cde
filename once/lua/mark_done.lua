-- Stores that the work of a slot has been done, for a time at least. It can be repeated.
-- KEYS[1]  done string
-- ARGV[1]  value
-- ARGV[2]  time in ms
-- Reply: 1 if the slot was not done before, else 0.

-- GET, not NX: a key of another type is an error.
if not redis.call('GET', KEYS[1]) then
	redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
	return 1
end
local left = redis.call('PTTL', KEYS[1])
if left >= 0 and left < tonumber(ARGV[2]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0

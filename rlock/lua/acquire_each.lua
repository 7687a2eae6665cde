-- Takes several locks in their order, up to the first that is taken.
-- KEYS[i]    lock hash
-- ARGV[1]    lease in ms
-- ARGV[2]    1 to take all of them or none
-- ARGV[2+i]  claim
-- Reply: 0 if all are acquired; otherwise how many are acquired; of the first that is taken,
-- PTTL; how many precede that.

local count, taken = #KEYS, 0
local old = {} -- those that an earlier delivery of this request has taken
if redis.call('EXISTS', unpack(KEYS)) > 0 then
	for i, key in ipairs(KEYS) do
		local fields = redis.call('HLEN', key)
		if fields > 0 then
			if redis.call('HEXISTS', key, ARGV[2 + i]) == 0 then
				local left = redis.call('PTTL', key)
				if left == 0 then -- a replica of Redis 6.2 keeps what has expired, and refuses this, which has no effect
					redis.call('HDEL', key, '')
				end
				if not kinds.of(key, fields) then
					return kinds.foreign()
				end
				count, taken = i - 1, left == -2 and 0 or left -- -2 if it has expired since
				break
			end
			old[i] = true
		end
	end
end
if count < #KEYS and ARGV[2] == '1' then
	return {0, taken, count}
end
for i = 1, count do
	if not old[i] then
		redis.call('HSET', KEYS[i], ARGV[2 + i], '1')
	end
	if not old[i] or redis.call('PTTL', KEYS[i]) < tonumber(ARGV[1]) then
		local expires = redis.pcall('PEXPIRE', KEYS[i], ARGV[1])
		if expires ~= 1 then -- without that right the user must not take them for ever
			for j = 1, i do
				if not old[j] then
					redis.call('DEL', KEYS[j])
				end
			end
			return expires
		end
	end
end
if count == #KEYS then
	return 0
end
return {count, taken, count}

-- What a Java client does to a latch, including its defects.
--KEYS[1]  count
--ARGV[1]  operation
--ARGV[2]  publish command
--ARGV[3]  channel
--ARGV[4]  count to set
--Reply: that of the Java client; the remaining count may be negative.

local key, what, publish, channel, count = KEYS[1], unpack(ARGV)

local function down()
	local left = redis.call('DECR', key)
	if left <= 0 then
		redis.call('DEL', key)
	end
	if left == 0 then
		redis.call(publish, channel, '0')
	end
	return left
end

local function set()
	if redis.call('EXISTS', key) == 1 then
		return 0
	end
	redis.call('SET', key, count)
	redis.call(publish, channel, '1')
	return 1
end

if what == 'down' then
	return down()
elseif what == 'set' then
	return set()
elseif what == 'delete' then
	local deleted = redis.call('DEL', key)
	if deleted == 1 then
		redis.call(publish, channel, '1')
	end
	return deleted
elseif what == 'reset' then -- ends the round and sets the next at once
	while redis.call('EXISTS', key) == 1 do
		down()
	end
	return set()
end
return redis.error_reply('ERR there is no step ' .. what)

-- Reply: for each key its name, type, time to live in ms and content; and the messages since
-- the last dump.
local read = {
	string = {'GET'},
	hash = {'HGETALL'},
	list = {'LRANGE', 0, -1},
	set = {'SMEMBERS'},
	zset = {'ZRANGE', 0, -1, 'WITHSCORES'},
}
local keys = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
	local left = redis.call('PTTL', key)
	if left ~= -2 and string.sub(key, 1, 5) ~= 'test:' then
		local kind = redis.call('TYPE', key).ok
		keys[#keys + 1] = {key, kind, left, redis.call(read[kind][1], key, unpack(read[kind], 2))}
	end
end
local messages = redis.call('LRANGE', 'test:told', 0, -1)
redis.call('DEL', 'test:told')
return {keys, messages}

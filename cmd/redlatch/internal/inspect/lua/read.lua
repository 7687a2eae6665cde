-- Reads all that belongs to a name, at one moment. Read-only.
-- KEYS[1]     main key; the last one declared, and so the one that selects the server
-- KEYS[2..]   helper keys
-- ARGV[1]     how many elements of a key to return
-- ARGV[2]     prefix of the keys of read holds
-- ARGV[3]     prefix of the channels of the waiters in KEYS[3], a list
-- ARGV[4]     1 in a cluster, where channels may be sharded, and subscribers of plain ones are counted
--             at every node
-- ARGV[5..]   channels
-- Reply: the time in ms; for each key its type, its PTTL, its size and elements; for each read hold of
-- KEYS[1] its field and the PTTL of its key; for each channel its subscribers, -1 if unknown, in a
-- cluster only those of the sharded one; the same for the channels of waiters.

local most = tonumber(ARGV[1])
-- No element of an object is longer. Those of an application's key may be.
local longest = 1024

-- Each returns the size and some of the elements of a key.
local elements = {
	string = function(key)
		return redis.call('STRLEN', key), {redis.call('GETRANGE', key, 0, 255)}
	end,
	hash = function(key)
		local some, mode = redis.call('HSCAN', key, 0, 'COUNT', most)[2], redis.call('HGET', key, 'mode')
		if mode then -- it may not be among these
			some[#some + 1] = 'mode'
			some[#some + 1] = mode
		end
		return redis.call('HLEN', key), some
	end,
	list = function(key)
		return redis.call('LLEN', key), redis.call('LRANGE', key, 0, most - 1)
	end,
	set = function(key)
		return redis.call('SCARD', key), redis.call('SSCAN', key, 0, 'COUNT', most)[2]
	end,
	zset = function(key)
		return redis.call('ZCARD', key), redis.call('ZRANGE', key, 0, most - 1, 'WITHSCORES')
	end,
}

local function subscribers(channel)
	-- pcall: without this right the number is unknown, and old servers have no sharded channels.
	if ARGV[4] == '1' then
		return redis.pcall('PUBSUB', 'SHARDNUMSUB', channel)[2] or 0
	end
	return redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or -1
end

local time = redis.call('TIME')
local keys, readers, channels, waiters = {}, {}, {}, {}
for i, key in ipairs(KEYS) do
	local kind, size, some = redis.call('TYPE', key).ok, 0, {}
	if elements[kind] then
		size, some = elements[kind](key)
		for j, element in ipairs(some) do
			some[j] = string.sub(element, 1, longest)
		end
	end
	keys[i] = {kind, redis.call('PTTL', key), size, some}
end
if keys[1][1] == 'hash' then
	local fields = keys[1][4]
	for i = 1, #fields, 2 do
		-- The hash may be an application's, with large numbers in many fields.
		for n = 1, math.min(tonumber(fields[i + 1]) or 0, most - #readers / 2) do
			readers[#readers + 1] = fields[i]
			readers[#readers + 1] = redis.call('PTTL', ARGV[2] .. fields[i] .. ':rwlock_timeout:' .. n)
		end
	end
end
for i = 5, #ARGV do
	channels[#channels + 1] = subscribers(ARGV[i])
end
if keys[3][1] == 'list' then
	for i, waiter in ipairs(keys[3][4]) do
		waiters[i] = subscribers(ARGV[3] .. waiter)
	end
end
return {time[1] * 1000 + math.floor(time[2] / 1000), keys, readers, channels, waiters}

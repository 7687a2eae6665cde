-- The format of Redisson's lock of several values of a group, and functions for its scripts. Go puts this file before
-- them.
--
-- The hash of a group has three fields for each value that is locked. The name of each begins with a hash of the value:
--   <value>                         the owner
--   <value>:<owner>:expire_time     when the owner's lease of the value ends, in ms since 1970
--   <value>:<owner>:lock_count      how often the owner has locked it; once for a claim of redlatch
-- The key lasts for as long as the longest lease at least. A value whose lease is over is free, although its fields are
-- left until somebody locks it.
local group = {}

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- owned returns the names of the two fields of an owner of a value.
local function owned(value, owner)
	return value .. ':' .. owner .. ':expire_time', value .. ':' .. owner .. ':lock_count'
end

-- is reports whether a hash is a group, by some of its fields. pcall: without this right it counts as one.
function group.is(key)
	for _, field in ipairs(redis.pcall('HRANDFIELD', key, 2)) do
		local rest = field:sub(23)
		if #field:match('^[%w+/]*') ~= 22
			or rest ~= '' and not rest:find('^:.+:expire_time$') and not rest:find('^:.+:lock_count$') then
			return false
		end
	end
	return true
end

-- left returns the ms for which an owner's lease of a value lasts, 0 if it is over.
function group.left(key, value, owner)
	local ends = tonumber(redis.call('HGET', key, (owned(value, owner))) or '')
	return ends and math.max(ends - now, 0) or 0
end

-- count returns how often an owner has locked a value.
function group.count(key, value, owner)
	local _, count = owned(value, owner)
	return tonumber(redis.call('HGET', key, count) or '') or 0
end

-- stands reports whether a claim has all values.
function group.stands(key, claim, values)
	for _, value in ipairs(values) do
		if redis.call('HGET', key, value) ~= claim or group.left(key, value, claim) == 0 then
			return false
		end
	end
	return true
end

-- give gives values to a claim, for a lease in ms from now. It shortens no lease of the claim.
function group.give(key, claim, values, lease)
	for _, value in ipairs(values) do
		local ends, count = owned(value, claim)
		if group.left(key, value, claim) < lease then
			redis.call('HSET', key, ends, string.format('%.0f', now + lease))
		end
		redis.call('HSET', key, value, claim, count, '1')
	end
end

-- drop removes what the owners of a table by value have left of their claims, and reports whether one had its value.
-- It is one command: the key is gone with its last field, and a node that moves its slot lets no script use it again.
function group.drop(key, owners)
	local fields, had = {}, false
	for value, owner in pairs(owners) do
		fields[#fields + 1], fields[#fields + 2] = owned(value, owner)
		if redis.call('HGET', key, value) == owner then
			fields[#fields + 1], had = value, true
		end
	end
	if #fields > 0 then
		redis.call('HDEL', key, unpack(fields))
	end
	return had
end

-- leave is drop for a claim to all values.
function group.leave(key, claim, values)
	local owners = {}
	for _, value in ipairs(values) do
		owners[value] = claim
	end
	return group.drop(key, owners)
end

-- raise makes the key last for a lease at least. A key without an expiry keeps none.
function group.raise(key, lease)
	local left = redis.call('PTTL', key)
	if left >= 0 and left < lease then
		redis.call('PEXPIRE', key, lease)
	end
end

-- keep makes a claim that stands last for at least a lease in ms from now.
function group.keep(key, claim, values, lease)
	redis.call('HDEL', key, '') -- it has no effect; a server out of memory lets a script go on that has begun to write
	group.give(key, claim, values, lease)
	group.raise(key, lease)
end

-- publish tells waiters that values are free, and returns the number of receivers. Of the threads of a Java client,
-- which may wait for different values, '0' wakes one, and remembers that if it is about to sleep. '1' wakes all that
-- sleep.
-- pcall: without the right to publish the release stands, and waiters poll.
function group.publish(command, channel)
	local receivers = redis.pcall(command, channel, '0')
	redis.pcall(command, channel, '1')
	return type(receivers) == 'number' and receivers or 0
end

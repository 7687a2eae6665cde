-- Functions shared by the latch scripts that write; prepended to each of them.
--
-- The latch is a string that holds a number. A second key holds the id of its round:
-- each TrySetCount writes a new one. A user without permission to write that key gets
-- no id.

local latch = {}

-- Returns the count if it is above zero, else nil. A value that is not a count is an
-- error.
function latch.count(key)
	local count = redis.call('GET', key)
	if not count then
		return nil
	end
	if not string.match(count, '^%-?[1-9]%d*$') and count ~= '0' then
		return nil, redis.error_reply('ERR value is not an integer or out of range')
	end
	count = tonumber(count)
	return count > 0 and count or nil
end

-- Ends a round.
function latch.finish(key, round)
	redis.call('DEL', key)
	redis.pcall('DEL', round)
end

-- Publishes a message. pcall: where publishing is forbidden, waiters poll.
function latch.publish(command, channel, payload)
	redis.pcall(command, channel, payload)
end

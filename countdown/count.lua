-- What the scripts of the count-down latch share; it stands before each of them that
-- may write.
--
-- The latch is a string with a number, and beside it stands the identity of its round:
-- a new one whenever the count is set. Who may not write that does without.

local latch = {}

-- Returns the count that is to come down, or nil. A key that is none is an error.
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
function latch.open(key, round)
	redis.call('DEL', key)
	redis.pcall('DEL', round)
end

-- Publishes a message. pcall: waiters look by themselves where it is not allowed.
function latch.tell(command, channel, payload)
	redis.pcall(command, channel, payload)
end

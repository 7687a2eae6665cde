-- The beginning of the latch scripts that write; prepended to each of them.
--
-- The latch is a string that holds a number. A second key holds the id of its round:
-- each TrySetCount writes a new one. A user without permission to write that key gets
-- no id. A third key caches the reply of one request, so that the request takes effect
-- once.
--
-- KEYS[1]  count
-- KEYS[2]  round id
-- KEYS[3]  cached reply
-- ARGV[1]  time to live of the cached reply, in ms
-- ARGV[2]  publish command
-- ARGV[3]  channel
-- ARGV[4]  payload

-- The request has run before, or was cancelled.
local cached = redis.call('GET', KEYS[3])
if cached then
	return tonumber(cached)
end

local stored = redis.call('GET', KEYS[1])
if stored and not string.match(stored, '^%-?[1-9]%d*$') and stored ~= '0' then
	return redis.error_reply('ERR value is not an integer or out of range')
end

local latch = {stored = stored, count = tonumber(stored) or 0}

-- Ends a round.
function latch.finish()
	redis.call('DEL', KEYS[1])
	redis.pcall('DEL', KEYS[2])
end

-- Publishes a message. pcall: where publishing is forbidden, waiters poll.
function latch.publish()
	redis.pcall(ARGV[2], ARGV[3], ARGV[4])
end

-- Caches the reply of a request that had an effect. It follows the effect, which may be
-- refused. pcall: a user without permission can cancel no request either.
function latch.reply(n)
	redis.pcall('SET', KEYS[3], n, 'PX', ARGV[1])
	return n
end

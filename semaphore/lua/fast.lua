-- The beginning of the scripts that serve a request alone, in the usual case: no other client
-- is in the wait queue, and the semaphore and the last requests of the client exist. In any
-- other case they have no effect and reply -1, and the client sends the request again, to the
-- script that begins with pool.lua. They define no function, call few commands, and pass those
-- texts rather than numbers, which are slow to convert, because most requests to a semaphore are
-- such cases.
--
-- They do not refresh the last requests: the client sends them only while the hash is sure to
-- outlive the request. An entry of theirs without a reply stands for the usual reply.
--
-- KEYS[1]  number of free permits
-- KEYS[2]  last requests of the client: see pool.lua
-- ARGV[1]  sequence number of the request
-- ARGV[2]  slot of the request
-- ARGV[3]  time in ms after which the request must not run

local call, try = redis.call, redis.pcall

local last = call('HGET', KEYS[2], ARGV[2])
if last then
	local number = string.match(last, '^%d+')
	if not number or number - ARGV[1] >= 0 then
		return -1
	end
elseif call('EXISTS', KEYS[2]) == 0 then
	return -1
end
-- Nearly the bounds of pool.cached, without milliseconds: this is a first attempt.
local time = call('TIME')
local left = ARGV[3] - time[1] * 1000
if left < 240000 or left >= 360000 then
	return -1
end
local entry = ARGV[1] .. ' ' .. time[1] .. ' ' .. time[2]
-- The entry of a request that has not run.
local before = last or ARGV[1] - 1 .. ' 0 0 -1'

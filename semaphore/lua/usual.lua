-- The first lines of the scripts that acquire and release. Most requests are of the usual case: the
-- request is new and alone, no client is in the wait queue, and the semaphore exists. The scripts
-- serve it before the functions of pool.lua are defined, with few commands, and with the same effects
-- and reply as the rest of the script. In any other case these lines have no effect.
--
-- KEYS, ARGV[1..6]  see pool.lua

local call, try = redis.call, redis.pcall

local last = call('HGET', KEYS[2], ARGV[2])
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = ARGV[3] - now
local usual = left >= tonumber(ARGV[4]) and left < 360000
	and (not last or (tonumber(string.match(last, '^%d+')) or math.huge) < tonumber(ARGV[1]))
	and call('EXISTS', KEYS[3]) == 0
-- The number of free permits in the usual case.
local free = usual and tonumber(call('GET', KEYS[1]) or nil)

-- Notes that the request has not run.
local function forget()
	call('HSET', KEYS[2], ARGV[2], last or ARGV[1] - 1 .. ' 0 0 -1')
end

-- Caches the reply and changes the number of free permits. Reports false, without an effect, if the
-- user or the server does not permit that: the rest of the script raises the error.
local function change(by, reply)
	local entry = ARGV[1] .. ' ' .. time[1] .. ' ' .. time[2] .. ' ' .. reply
	if type(try('HSET', KEYS[2], ARGV[2], entry)) ~= 'number' then
		return false
	end
	if try('PEXPIRE', KEYS[2], 720000) == 1 and type(try('INCRBY', KEYS[1], by)) == 'number' then
		return true
	end
	forget()
	return false
end

-- Publishes a number of permits, if a waiter can be served, and returns the number of receivers.
local function publish(n)
	-- try: without the right to publish the release is still valid, and waiters poll.
	local receivers = n > 0 and try(ARGV[5], ARGV[6], string.format('%d', n))
	return type(receivers) == 'number' and receivers or 0
end

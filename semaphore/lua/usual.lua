-- The first lines of the scripts that acquire and release. Most requests are of the usual case: the
-- request is new and alone, it is not the first of its slot in a hundred seconds, the semaphore exists, and no
-- client is in the wait queue. The scripts serve it before the functions of pool.lua are defined, with few
-- commands, and with the same effects and reply as the rest of the script. In any other case these lines have
-- no effect.
--
-- KEYS, ARGV[1..6]  see pool.lua

local call, try = redis.call, redis.pcall

local last = call('HGET', KEYS[2], ARGV[2])
local number, hundreds = string.match(last or '', '^(%d+) (%d+)%d%d ')
local time = call('TIME')
-- The ms that are left, or up to a second less: the milliseconds are not worth their cost.
local left = ARGV[3] - time[1] * 1000 - 1000
-- The third key counts twice.
local usual = number and number - ARGV[1] < 0 and hundreds == string.sub(time[1], 1, -3)
	and left - ARGV[4] >= 0 and left < 359000 and call('EXISTS', KEYS[1], KEYS[3], KEYS[3]) == 1

-- Caches the reply, changes the number of free permits, and returns the result. Returns nil, without an
-- effect, if the user or the server does not permit that: the rest of the script raises the error.
local function change(by, reply)
	local entry = ARGV[1] .. ' ' .. time[1] .. ' ' .. time[2] .. ' ' .. reply
	if type(try('HSET', KEYS[2], ARGV[2], entry)) ~= 'number' then
		return nil
	end
	local free = try('INCRBY', KEYS[1], by)
	if type(free) == 'number' then
		return free
	end
	call('HSET', KEYS[2], ARGV[2], last)
end

-- Undoes change.
local function undo(by)
	call('INCRBY', KEYS[1], by)
	call('HSET', KEYS[2], ARGV[2], last)
end

-- Publishes a number of permits, if a waiter can be served, and returns the number of receivers.
local function publish(free)
	-- try: without the right to publish the release is still valid, and waiters poll.
	local receivers = free > 0 and try(ARGV[5], ARGV[6], free)
	return type(receivers) == 'number' and receivers or 0
end

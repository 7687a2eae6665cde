-- Gives a semaphore the lifetime that semaphore.IdleTTL asks for. Go puts the whole text of another script, as
-- the function operation, before this file, and idle_use.lua or idle_renew.lua after it.
--
-- The number of free permits and the acquired permits always get the same lifetime. If the second expired
-- first, its permits would be neither free nor acquired. The lifetime begins again with every use, but is set
-- only if it is shorter than what was asked for, or longer by more than a tenth.
-- ARGV[#ARGV]  lifetime of an unused semaphore in ms. The operation does not see it among its arguments; for
--              permits.lua it is ARGV.idle.

ARGV.idle = tonumber(table.remove(ARGV))

local no_expiry = 922337203685477 -- see permits.lua

-- Sets the lifetime of a semaphore, if there is one. acquired is the key of its acquired permits, nil if only
-- their holders know them. It does not fail, because the operation has taken effect.
local function keep(free, acquired)
	local last = acquired and tonumber(redis.pcall('ZRANGE', acquired, -1, -1, 'WITHSCORES')[2])
	local other = last and redis.pcall('PTTL', acquired) or 0
	local ttl = redis.pcall('PTTL', free)
	if type(ttl) ~= 'number' or type(other) ~= 'number' or ttl == -2 then
		return
	end
	if last and last >= no_expiry then
		if ttl ~= -1 or other ~= -1 then
			redis.pcall('PERSIST', free)
			redis.pcall('PERSIST', acquired)
		end
		return
	end
	local least, together = ARGV.idle, true
	if last then
		local time = redis.call('TIME')
		least = math.max(least, last - time[1] * 1000 - math.floor(time[2] / 1000))
		-- Redis 6.2 has the time of each command, so the second key may expire some ms after the first.
		together = ttl <= other and other <= ttl + 1000
	end
	local slack = math.floor(ARGV.idle / 10)
	if ttl < least or ttl > least + slack or not together then
		redis.pcall('PEXPIRE', free, least + slack)
		if last then
			redis.pcall('PEXPIRE', acquired, least + slack)
		end
	end
end

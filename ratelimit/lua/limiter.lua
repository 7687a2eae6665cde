-- The beginning of the scripts of a rate limiter; prepended to most of them.
--
-- Redisson's format: a hash has the configuration. A sorted set has an entry for each acquisition in the
-- window, with the time at which it was made: a byte with the length of an id, the id, and the number of permits
-- in four bytes, the lowest first. A number is what the entries leave of the rate. So at any time the number and
-- the permits of all entries, which may have expired, add up to the rate. If a limiter is of the type 1, each
-- client has a set and a number of its own.
--
-- One more key is redlatch's: the turn. While a client waits for permits it has the turn, and no client
-- that has begun to wait later is served. It expires if the client does not come again in time.
--
-- KEYS[1]  configuration
-- KEYS[2]  number of free permits
-- KEYS[3]  number of free permits of this client
-- KEYS[4]  entries
-- KEYS[5]  entries of this client
-- KEYS[6]  turn

local call = redis.call

local limiter = {}

-- The number of entries that are read at once.
local few = 100

local rate, interval, keep, own, free, stored, now, micros
local taken = 0 -- permits without an entry so far
local values, entries = KEYS[2], KEYS[4]
local wrong_type = {err = 'WRONGTYPE The key has no configuration or state of a rate limiter'}

-- Reads the configuration and the time. Returns the reply of the script if it cannot go on: -1 without a
-- configuration.
function limiter.load()
	local config = call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime')
	if not (config[1] and config[2] and config[3]) then
		return {-1}
	end
	rate, interval, keep = tonumber(config[1]), tonumber(config[2]), tonumber(config[4] or '0')
	if not (rate and interval and keep) then
		return wrong_type
	end
	own = config[3] == '1'
	if own then
		values, entries = KEYS[3], KEYS[5]
	end
	local time = call('TIME')
	now = time[1] * 1000 + math.floor(time[2] / 1000)
	micros = time[2] % 1000
end

-- Returns the permits of an entry.
local function size(entry)
	local a, b, c, d = string.byte(entry, -4, -1)
	return a + b * 256 + c * 65536 + d * 16777216
end

local function sum(list)
	local n = 0
	for _, entry in ipairs(list) do
		n = n + size(entry)
	end
	return n
end

-- Finds out the number of free permits from the entries. It is wrong on the server if one of the two keys was lost,
-- or if others have written it.
local function count()
	call('ZREMRANGEBYSCORE', entries, '-inf', now - interval)
	free = rate - sum(call('ZRANGE', entries, 0, -1)) - taken
end

limiter.count = count

-- Reads the number of free permits. Returns the reply of the script if it cannot go on.
function limiter.read()
	local text = call('GET', values)
	stored = text and tonumber(text)
	free = stored
	if text and not stored then
		return wrong_type
	end
	if not stored or stored > rate then
		count()
	end
end

-- Takes the permits of expired entries back until n are free or no such entry is left. The rest can wait: a request
-- after a long pause would have to read up to as many entries as the rate has permits.
local function reclaim(n)
	while free < n do
		local old = call('ZRANGEBYSCORE', entries, '-inf', now - interval, 'LIMIT', 0, few)
		if #old == 0 then
			return
		end
		free = free + sum(old)
		call('ZREMRANGEBYRANK', entries, 0, #old - 1)
	end
	if free > rate then
		count()
	end
end

-- Gives entries of the future the present time. They were made when a clock was ahead: that of a client of
-- Redisson, or of the server.
local function correct()
	local ahead = call('ZRANGEBYSCORE', entries, '(' .. now, '+inf', 'LIMIT', 0, few)
	for _, entry in ipairs(ahead) do
		call('ZADD', entries, 'XX', now, entry)
	end
end

-- Returns the time at which n permits will be free, nil if all acquisitions together do not have as many, and the
-- time for a larger number, nil if that is not among the next entries. Less than n are free now.
local function due(n, more)
	local total, from, first = free, 0, nil
	while true do
		local list = call('ZRANGE', entries, from, from + few - 1, 'WITHSCORES')
		for i = 1, #list, 2 do
			local at = tonumber(list[i + 1])
			total = total + size(list[i])
			if total >= n and not first then
				first = math.min(at, now) + interval
				if at > now then
					correct()
				end
			end
			if first and total >= more then
				return first, math.min(at, now) + interval
			end
		end
		if first then
			return first
		end
		if #list == 0 then
			return total + taken >= n and now + interval or nil
		end
		from = from + few
	end
end

-- Returns the time in ms at which n permits, no more than the rate, will be free; now or less if they are. If they are
-- not, it may also return the time for a larger number.
function limiter.due(n, more)
	reclaim(n)
	if free >= n then
		return now
	end
	local at, later = due(n, more)
	if not at then
		count() -- permits are missing
		if free >= n then
			return now
		end
		at, later = due(n, more)
	end
	return at, later
end

-- Takes n permits, which have to be free.
function limiter.take(n) free, taken = free - n, taken + n end

-- Adds entries to the set, from a list of their times and names, for the permits that were taken. n of them
-- are not there yet, as far as the client knows.
function limiter.add(list, n)
	taken = 0
	if call('ZADD', entries, unpack(list)) < n then
		count() -- a request has come twice
	end
end

-- Gives n permits back.
function limiter.give(n) free = free + n end

function limiter.rate() return rate end

function limiter.free() return free end

function limiter.interval() return interval end

-- Returns the time in ms, and its microseconds.
function limiter.now() return now, micros end

-- Reports whether each client has permits of its own.
function limiter.own() return own end

function limiter.entries() return entries end

limiter.size = size

-- Returns an entry with n permits in place of its own.
function limiter.resized(entry, n)
	local bytes = {}
	for i = 1, 4 do
		bytes[i] = n % 256
		n = math.floor(n / 256)
	end
	return string.sub(entry, 1, -5) .. string.char(unpack(bytes))
end

-- Stores the number of free permits if it has changed, and sets the lifetime of the keys, as Redisson does. Returns
-- the error if the server does not store the number.
function limiter.store()
	local ttl = keep > 0 and keep or call('PTTL', KEYS[1])
	local reply
	if free == stored or not stored and free == rate then
		reply = ttl > 0 and redis.pcall('PEXPIRE', values, ttl)
	elseif ttl > 0 then
		reply = redis.pcall('SET', values, free, 'PX', ttl)
	elseif stored then
		reply = redis.pcall('INCRBY', values, free - stored) -- keeps a lifetime
	else
		reply = redis.pcall('SET', values, free)
	end
	if type(reply) == 'table' and reply.err then
		return reply
	end
	if ttl > 0 then
		call('PEXPIRE', entries, ttl)
	end
	if keep > 0 then
		call('PEXPIRE', KEYS[1], keep)
	end
end

-- Stores the number of free permits that a new rate leaves, and sets the lifetime of the keys.
function limiter.recount()
	count()
	if free == rate then
		call('DEL', values)
	else
		call('SET', values, free)
	end
	for _, key in ipairs({KEYS[1], values, entries}) do
		if keep > 0 then
			call('PEXPIRE', key, keep)
		else
			call('PERSIST', key)
		end
	end
end

-- Finds out the number of free permits without a change. Returns the reply of the script if it cannot go on.
function limiter.peek()
	local text = call('GET', values)
	free = text and tonumber(text)
	if text and not free then
		return wrong_type
	end
	local expired, all = call('ZCOUNT', entries, '-inf', now - interval), call('ZCARD', entries)
	if free and expired <= all - expired then
		free = free + sum(call('ZRANGEBYSCORE', entries, '-inf', now - interval))
	end
	if not free or expired > all - expired or free > rate then
		free = rate - sum(call('ZRANGEBYSCORE', entries, '(' .. now - interval, '+inf'))
	end
end

-- Publishes that permits may be free earlier than waiters know. pcall: without the right, waiters poll.
function limiter.publish(command, channel) redis.pcall(command, channel, '1') end

-- What the scripts of the expirable semaphore share; it stands before each of them,
-- behind pool.lua where they write.
--
-- Beside the number of free permits is a sorted set of those that are taken: a permit
-- is 16 bytes, its score the time in ms at which it expires. Permits that have expired
-- are still in it until somebody needs them.
-- KEYS[5]  permits that are taken; KEYS[2] of scripts that only read

local permits = {}

-- The time at which permits expire that never do, as Redisson has it.
permits.never = 922337203685477

local chunk = 100
-- How many expired permits a script takes back at most, unless more are wanted.
local most = 1000

-- Calls what is to be done with each part of a list that a command can take.
local function chunks(list, size, call)
	for i = 1, #list, size do
		call(unpack(list, i, math.min(i + size - 1, #list)))
	end
end

-- Takes expired permits back and returns how many are free then. It does so also if
-- enough are free without them: what has expired is told of as a reason to try again,
-- and whoever does must find it gone, whether or not it is their turn.
function permits.sweep(key, taken, free, now, wanted)
	for _ = 1, math.ceil(math.max(most, wanted) / chunk) do
		local expired = redis.call('ZRANGEBYSCORE', taken, '-inf', now, 'LIMIT', 0, chunk)
		if #expired == 0 then
			break
		end
		-- A user who may not do both must do neither; the first of these does nothing.
		redis.call('ZREM', taken, '')
		redis.call('INCRBY', key, #expired)
		redis.call('ZREM', taken, unpack(expired))
		free = free + #expired
	end
	return free
end

-- After how many ms the next permit expires, 0 if one has; -1 if none ever will.
function permits.next(taken, now)
	local first = redis.call('ZRANGE', taken, 0, 0, 'WITHSCORES')
	local at = tonumber(first[2])
	if not at or at >= permits.never then
		return -1
	end
	return math.max(0, at - now)
end

-- Whether somebody has a permit now.
function permits.held(taken, id, now)
	local at = redis.call('ZSCORE', taken, id)
	return at and tonumber(at) > now
end

-- When a permit taken now expires. lease is in ms, or 'forever'.
function permits.deadline(lease, now)
	return lease == 'forever' and permits.never or now + lease
end

-- Makes the permits that are taken last no longer than the semaphore.
local function bind(key, taken)
	local ttl = redis.call('PTTL', key)
	if ttl > 0 then
		redis.call('PEXPIRE', taken, ttl)
	end
end

-- Raises an error for a user who may not do what permits.give does, or may not give
-- back, and changes nothing. It comes before all that such a user must not do either.
function permits.check(key, taken)
	redis.call('ZADD', taken, 'XX', 0, '') -- first: a server out of memory refuses no more than the first write
	redis.call('ZREM', taken, '')
	bind(key, taken)
end

-- Gives permits out: entries are times and permits, one after the other. Whoever calls
-- takes them off the number of free ones.
function permits.give(key, taken, entries)
	chunks(entries, 2 * chunk, function(...)
		redis.call('ZADD', taken, ...)
	end)
	bind(key, taken)
end

function permits.drop(taken, ids)
	local dropped = 0
	chunks(ids, chunk, function(...)
		dropped = dropped + redis.call('ZREM', taken, ...)
	end)
	return dropped
end

-- What permits.give wants for the first requests of those that pool.serve has looked
-- at. Each has three arguments, the third its lease, and behind them all are the
-- permits of each, in their order.
function permits.entries(at, requests, now)
	local entries = {}
	local id = at + 4 + 3 * tonumber(ARGV[at + 3])
	for i = 0, requests - 1 do
		local first = at + 4 + 3 * i
		for _ = 1, tonumber(ARGV[first]) do
			entries[#entries + 1] = permits.deadline(ARGV[first + 2], now)
			entries[#entries + 1] = ARGV[id]
			id = id + 1
		end
	end
	return entries
end

-- After how many ms trying again may help, -1 if that is not known.
function permits.again(served, taken, now)
	local nearest = permits.next(taken, now)
	if nearest < 0 or served.again >= 0 and served.again < nearest then
		return served.again
	end
	return nearest
end

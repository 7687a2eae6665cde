-- Functions shared by the scripts of the permit semaphore. This file is prepended to
-- each of them, after pool.lua where a script has both.
--
-- Besides the number of free permits, a permit semaphore has a sorted set of the
-- acquired permits: members are 16-byte ids, scores the times in ms at which the permits
-- expire. An expired permit remains in the set until an acquisition removes it.
-- KEYS[6]  acquired permits; KEYS[2] in scripts without pool.lua

local permits = {}

-- The score of a permit that never expires, as in Redisson.
permits.no_expiry = 922337203685477

local chunk = 100
-- The most expired permits that a script removes, unless the requests want more.
local max_sweep = 1000

-- Calls a function with slices of a list that are short enough for one command.
local function chunks(list, size, call)
	for i = 1, #list, size do
		call(unpack(list, i, math.min(i + size - 1, #list)))
	end
end

-- Frees expired permits and returns the number of free permits afterwards. It does so even if
-- enough permits are free: replies name an expiry as the time to retry, and if the permit were
-- still there a client that may not be served would retry in a loop.
function permits.sweep(key, taken, free, now, wanted)
	for _ = 1, math.ceil(math.max(max_sweep, wanted) / chunk) do
		local expired = redis.call('ZRANGEBYSCORE', taken, '-inf', now, 'LIMIT', 0, chunk)
		if #expired == 0 then
			break
		end
		-- A user without the right to ZREM must not run INCRBY: the first ZREM removes
		-- nothing and only tests the right.
		redis.call('ZREM', taken, '')
		redis.call('INCRBY', key, #expired)
		redis.call('ZREM', taken, unpack(expired))
		free = free + #expired
	end
	return free
end

-- Creates the semaphore with a total number of permits and returns the number of free ones.
-- Permits that have outlived the old number count.
function permits.create(total)
	return pool.create(total - pool.outlived())
end

-- Returns the most permits that a request can get: the total, free and acquired. Requests
-- of any size wait while there is no permit at all.
function permits.most(free, taken)
	local total = free and free + redis.call('ZCARD', taken) or 0
	return total > 0 and total or pool.max
end

-- Returns the ms until the next permit expires, 0 if one has expired, -1 if none will.
function permits.next_expiry(taken, now)
	local first = redis.call('ZRANGE', taken, 0, 0, 'WITHSCORES')
	local at = tonumber(first[2])
	if not at or at >= permits.no_expiry then
		return -1
	end
	return math.max(0, at - now)
end

-- Reports whether a permit is acquired and has not expired.
function permits.held(taken, id, now)
	local at = redis.call('ZSCORE', taken, id)
	return at and tonumber(at) > now
end

-- Returns when a lease that begins now ends. lease is in ms, or 'forever'. now is rounded
-- down: without another ms the permit would expire before the lease ends.
function permits.deadline(lease, now)
	return lease == 'forever' and permits.no_expiry or now + lease + 1
end

-- Limits the life of the acquired permits to that of the semaphore.
local function bind(key, taken)
	if ARGV.idle then
		return -- idle.lua sets both
	end
	local ttl = redis.call('PTTL', key)
	if ttl > 0 then
		redis.call('PEXPIRE', taken, ttl)
	end
end

-- Fails, without any change, if the user lacks a right that permits.grant or
-- permits.remove needs. It runs before anything that must not happen in that case.
function permits.check(key, taken)
	redis.call('ZADD', taken, 'XX', 0, '') -- first: a server out of memory rejects only the first write
	redis.call('ZREM', taken, '')
	bind(key, taken)
end

-- Adds acquired permits. entries alternates scores and ids. The caller reduces the number
-- of free permits.
function permits.grant(key, taken, entries)
	chunks(entries, 2 * chunk, function(...)
		redis.call('ZADD', taken, ...)
	end)
	bind(key, taken)
end

-- Removes permits and returns how many of them were in the set.
function permits.remove(taken, ids)
	local removed = 0
	chunks(ids, chunk, function(...)
		removed = removed + redis.call('ZREM', taken, ...)
	end)
	return removed
end

-- Returns the entries for permits.grant of the first requests of a batch. The third
-- argument of each request is its lease. After the requests follow the ids of all
-- permits, in the order of the requests.
function permits.entries(at, requests, now)
	local entries = {}
	local id = at + 5 + 3 * tonumber(ARGV[at + 4])
	for i = 0, requests - 1 do
		local first = at + 5 + 3 * i
		for _ = 1, tonumber(ARGV[first]) do
			entries[#entries + 1] = permits.deadline(ARGV[first + 2], now)
			entries[#entries + 1] = ARGV[id]
			id = id + 1
		end
	end
	return entries
end

-- Returns the ms after which a retry may succeed, -1 if unknown.
function permits.retry_in(served, taken, now)
	local expiry = permits.next_expiry(taken, now)
	if expiry < 0 or served.retry_in >= 0 and served.retry_in < expiry then
		return served.retry_in
	end
	return expiry
end

-- Functions shared by the scripts of both semaphores. This file is prepended to every
-- script that writes.
--
-- A semaphore is a string: the number of free permits. That is all Redisson knows. The
-- other keys are redlatch's own, and all of them expire:
--
-- The last requests of a client make requests take effect exactly once, however often and
-- however late they are delivered (see semaphore.go). A hash has a field for each slot of the
-- client: the last sequence number of that slot, the time at which that request ran, and its
-- reply. The hash outlives the time until which any of these requests is accepted.
--
-- The wait queue holds the clients whose first request has waited for long, with the time
-- since when. A second set holds the deadlines of their heartbeats. No redlatch client
-- overtakes the first client of the queue whose heartbeat is not overdue. The queue is
-- empty unless a request would starve.
--
-- KEYS[1]  number of free permits
-- KEYS[2]  last requests of the client
-- KEYS[3]  wait queue, KEYS[4] heartbeats
-- KEYS[5]  time at which the semaphore was created or deleted last
-- KEYS[6]  acquired permits, of a permit semaphore
-- ARGV[1]  sequence number of the request
-- ARGV[2]  slot of the request
-- ARGV[3]  time in ms after which the request must not run
-- ARGV[4]  ms that must be left until then
-- ARGV[5]  command that publishes
-- ARGV[6]  channel

local pool = {}

local permits, requests, queue, heartbeats = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local created = KEYS[5]

-- The most permits a semaphore can have: an int of Java.
pool.max = 2147483647

-- A request is accepted less than this time before its end, in ms. Its reply is cached for at
-- least this time after it: the first request of a slot in a hundred seconds gives the last requests
-- their lifetime, which therefore is longer by more than a hundred seconds. usual.lua knows these numbers.
local accepted = 360000
local lifetime = accepted + 120000
local hundred = 100 * 1000000 -- in microseconds

-- The longest entry for a request. No reply has more than six numbers.
local longest_entry = 200

local seconds, micros

-- Returns the server's time, as the texts of seconds and microseconds, the same one throughout
-- a script.
local function time()
	if not seconds then
		seconds, micros = unpack(redis.call('TIME'))
	end
	return seconds, micros
end

-- Returns the server's time in ms.
function pool.now()
	local s, us = time()
	return s * 1000 + math.floor(us / 1000)
end

local ran = 0 -- when the last request of the slot ran, in microseconds

-- Returns the reply of this request if it has run before, else nil. The reply is empty for a request
-- that arrives after a later one of its slot: its caller no longer waits.
function pool.last()
	local entry = redis.call('HGET', requests, ARGV[2])
	if not entry then
		return nil
	end
	local number, s, us, rest = string.match(entry, '^(%d+) (%d+) (%d+)(.*)$')
	if not number or #entry > longest_entry then
		error('The last request of this client is not an entry of redlatch', 0)
	end
	ran = s * 1000000 + us
	if tonumber(number) ~= tonumber(ARGV[1]) then
		return tonumber(number) > tonumber(ARGV[1]) and {} or nil
	end
	local reply = {}
	for n in string.gmatch(rest, '%-?%d+') do
		reply[#reply + 1] = tonumber(n)
	end
	return reply
end

-- Returns the reply of a request that must not run, else nil: that of pool.last or, if the
-- request comes too late, -1 and the server's time. No other reply has two numbers. A
-- request for a time that is too far ahead must not run, either.
function pool.cached()
	local last = pool.last()
	if last then
		return last
	end
	local left = ARGV[3] - pool.now()
	if left < tonumber(ARGV[4]) or left >= accepted then
		return {-1, pool.now()}
	end
end

-- Notes that the request with this number has run.
local function note(number, reply)
	local s, us = time()
	redis.call('HSET', requests, ARGV[2], table.concat({number, s, us, unpack(reply)}, ' '))
end

-- Caches the reply of this request. It runs before the effects of the request, so that a
-- user who lacks the right to one of the two does neither.
function pool.cache(reply)
	local s, us = time()
	local is_first = math.floor(ran / hundred) ~= math.floor((s * 1000000 + us) / hundred)
	note(ARGV[1], reply)
	if is_first and redis.pcall('PEXPIRE', requests, lifetime) ~= 1 then
		redis.call('HDEL', requests, ARGV[2]) -- without this right no key without expiry is left
		redis.call('PEXPIRE', requests, lifetime) -- raises the error
	end
	return reply
end

-- Notes that permits acquired before are not those of this semaphore, or of its successor. It
-- runs before the reply is cached, so that a user who lacks the right to it does neither.
function pool.created()
	local s, us = time()
	redis.call('SET', created, s .. ' ' .. us, 'PX', accepted)
end

-- Creates the semaphore and returns its number of free permits. It runs before the reply is
-- cached: to create the semaphore again would change nothing, and the permits that this
-- request acquires are those of the new one.
function pool.create(n)
	pool.created()
	return redis.call('INCRBY', permits, n)
end

-- Returns the number of acquired permits that the server has although the number of free ones
-- is gone, and keeps them from expiring with it. It precedes the creation of a semaphore.
function pool.outlived()
	local acquired = pool.acquired()
	if acquired > 0 then
		redis.call('PERSIST', KEYS[6])
	end
	return acquired
end

-- Reports whether the semaphore was created after the last request of the slot.
function pool.recreated()
	local at = redis.call('GET', created)
	if not at then
		return false
	end
	local s, us = string.match(at, '^(%d+) (%d+)$')
	return s * 1000000 + us > ran
end

-- Changes the number of free permits and returns the result. All other effects of a request come
-- after it: if the user lacks the right, the request has not run.
function pool.change(by)
	local free = redis.pcall('INCRBY', permits, by)
	if type(free) ~= 'number' then
		note(ARGV[1] - 1, {-1}) -- a late duplicate of that request has no effect
		redis.call('INCRBY', permits, by) -- raises the error
	end
	return free
end

-- Precedes the writes of a script that releases permits. A server out of memory rejects
-- only the first write of a script, and only if it may need memory: this one needs none
-- and has no effect.
function pool.begin_release()
	redis.pcall('ZREM', queue, '')
end

-- Returns the number of free permits, nil if there is no semaphore.
function pool.free()
	local value = redis.call('GET', permits)
	if value and not tonumber(value) then
		redis.call('INCRBY', permits, 0) -- raises the error
	end
	return value and tonumber(value) or nil
end

-- Returns the number of acquired permits, 0 if only their holders know it.
function pool.acquired()
	return KEYS[6] and redis.call('ZCARD', KEYS[6]) or 0
end

-- Publishes a number of permits, unless no waiter can be served, and returns the number
-- of receivers.
function pool.publish(n)
	if n <= 0 then
		return 0
	end
	-- pcall: without the right to publish the release is still valid, and waiters poll.
	local receivers = redis.pcall(ARGV[5], ARGV[6], n)
	return type(receivers) == 'number' and receivers or 0
end

-- Extends the life of a key to at least ttl from now.
local function keep(key, ttl)
	if redis.call('PTTL', key) < tonumber(ttl) then
		redis.call('PEXPIRE', key, ttl)
	end
end

-- Removes a client from the wait queue and reports whether it was in it.
function pool.dequeue(client)
	redis.call('ZREM', heartbeats, client)
	return redis.call('ZREM', queue, client) == 1
end

-- Adds a client to the wait queue, unless it is there, for a request that has waited for some ms. Its
-- heartbeat is overdue after ttl ms.
local function enqueue(client, waited, ttl)
	keep(queue, ttl) -- first: without this right no key without expiry is created
	keep(heartbeats, ttl)
	redis.call('ZADD', queue, 'NX', pool.now() - waited, client)
	redis.call('ZADD', heartbeats, pool.now() + ttl, client)
	keep(queue, ttl)
	keep(heartbeats, ttl)
end

-- Moves a client of the wait queue to the place of a request that has waited for some ms, and reports
-- whether it was in the queue. It does not move forward: the call may be late.
function pool.move(client, waited, ttl)
	local since = redis.call('ZSCORE', queue, client)
	if not since then
		return false
	end
	redis.call('ZADD', queue, 'XX', math.max(tonumber(since), pool.now() - waited), client)
	enqueue(client, waited, ttl)
	return true
end

-- No heartbeat is overdue later than after this time, in ms. A later one is not a client's.
local longest = 3000
-- A script removes at most so many clients from the wait queue.
local most_dead = 1000

-- Returns the first client of the wait queue whose heartbeat is not overdue, nil if there
-- is none; the time since when it waits; and the ms until its next heartbeat is overdue.
-- Clients before it are removed. If they are too many, the next one counts as alive for a moment.
local function first()
	local removed = 0
	while true do
		local client, since = unpack(redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES'))
		if not client then
			return nil
		end
		local left = tonumber(redis.call('ZSCORE', heartbeats, client) or 0) - pool.now()
		if left > longest then
			left = longest
			-- pcall: the next request can do this.
			redis.pcall('ZADD', heartbeats, pool.now() + longest, client)
		end
		if left > 0 then
			return client, tonumber(since), left
		end
		if removed == most_dead then
			return client, tonumber(since), 1
		end
		pool.dequeue(client)
		removed = removed + 1
	end
end

-- Serves a batch of requests of one client, in order, as far as the free permits go, but
-- none before an older request in the wait queue. It changes only the queue.
--
-- ARGV contains, from index at: the client, '' if it does not wait; the ms of waiting
-- after which it joins the queue; the ms after which its heartbeat is overdue; the size with
-- which a missing semaphore is created, 0 if it is not; the number of requests; and for each
-- request, in width arguments, its permits and the ms it has waited. A request for more than
-- the most permits does not join the queue, and its client leaves it.
--
-- Returns a table. n: number of requests served; taken: their permits; retry_in: ms after
-- which the client ahead may have been removed, or -1; queued: 1 if the client is in the
-- queue for the next request, -1 if there is no semaphore, else 0; left: whether the client
-- has left the queue, so that those behind it can be served.
function pool.serve(free, at, width, most)
	local me, count = ARGV[at], tonumber(ARGV[at + 4])
	local served = {n = 0, taken = 0, retry_in = -1, queued = free and 0 or -1, left = false}
	local head, since, left = first()
	while served.n < count do
		local n = tonumber(ARGV[at + 5 + served.n * width])
		local waited = tonumber(ARGV[at + 6 + served.n * width])
		if head and head ~= me and since < pool.now() - waited then
			served.retry_in = left
			break
		end
		if served.taken + n > (free or 0) then
			break
		end
		if head and pool.dequeue(me) then
			served.left = true
			head, since, left = first()
		end
		served.n, served.taken = served.n + 1, served.taken + n
	end
	if me ~= '' and served.n < count then
		local waited = tonumber(ARGV[at + 6 + served.n * width])
		if not free or tonumber(ARGV[at + 5 + served.n * width]) > most then
			-- Without a semaphore there is no order.
			served.left = pool.dequeue(me) or served.left
		elseif waited >= tonumber(ARGV[at + 1]) then
			enqueue(me, waited, ARGV[at + 2])
			served.queued = 1
		end
	end
	return served
end

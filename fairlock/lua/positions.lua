-- Functions for the queue of a fair lock. Go puts this file before each script.
--
-- A waiter has a position in a list and two times, in ms of the server's clock. Its
-- deadline is in a sorted set of Redisson's. The time until which its last heartbeat
-- counts is in a sorted set that only redlatch knows. A waiter without a heartbeat waits
-- in Java, and is dropped at its deadline. The deadline of our own waiter only keeps
-- Redisson from evicting it: it is one wait for each position ahead, or more.
local positions = {}

-- open reads the state that the other functions use. first is the index in KEYS of the
-- lock hash, which the list, the deadlines and the heartbeats follow. wait is Redisson's
-- fairLockWaitTimeout, and ttl is how long a heartbeat keeps a position, both in ms.
function positions.open(first, wait, ttl)
	local q = {
		lock = KEYS[first],
		list = KEYS[first + 1],
		deadlines = KEYS[first + 2],
		heartbeats = KEYS[first + 3],
		wait = tonumber(wait),
		position_ttl = tonumber(ttl),
	}
	-- A key of another type is an error here, before anything is changed.
	q.head = positions.head(q)
	-- Every waiter in the list has a deadline, unless a key was changed by hand.
	q.intact = redis.call('LLEN', q.list) == redis.call('ZCARD', q.deadlines)
	redis.call('ZCARD', q.heartbeats)
	local time = redis.call('TIME')
	q.now = time[1] * 1000 + math.floor(time[2] / 1000)
	local lease = redis.call('PTTL', q.lock)
	q.free, q.expires, q.ttl = lease == -2, lease ~= -1, math.max(lease, 0)
	return q
end

-- taken records that the script has set the lease to ttl ms.
function positions.taken(q, ttl)
	q.free, q.expires, q.ttl = false, true, tonumber(ttl)
end

-- free frees the lock.
function positions.free(q)
	redis.call('DEL', q.lock)
	q.free, q.expires, q.ttl, q.freed = true, true, 0, true
end

-- extend makes the lease last at least ttl ms.
function positions.extend(q, ttl)
	if q.ttl < tonumber(ttl) then
		redis.call('PEXPIRE', q.lock, ttl)
		positions.taken(q, ttl)
	end
end

function positions.head(q)
	return redis.call('LINDEX', q.list, 0)
end

-- queued reports whether a waiter is in the list. It searches the list only if it must.
function positions.queued(q, waiter)
	if q.intact then
		return redis.call('ZSCORE', q.deadlines, waiter)
	end
	return redis.call('LPOS', q.list, waiter)
end

-- dies returns when a waiter counts as dead, or nil. The deadline of our own waiter does not
-- count: Java may have pushed it into the past.
function positions.dies(q, waiter)
	return tonumber(redis.call('ZSCORE', q.heartbeats, waiter) or redis.call('ZSCORE', q.deadlines, waiter))
end

-- purge removes dead waiters from the head of the list. It does not fail for lack of
-- memory.
function positions.purge(q)
	local waiter = positions.head(q)
	while waiter do
		local dies = positions.dies(q, waiter)
		if not dies then
			-- Redisson would never evict it. pcall: the next request can do this.
			redis.pcall('ZADD', q.deadlines, q.now + q.wait, waiter)
		end
		if not dies or dies > q.now then
			break
		end
		redis.call('LPOP', q.list)
		redis.call('ZREM', q.deadlines, waiter)
		redis.call('ZREM', q.heartbeats, waiter)
		waiter = positions.head(q)
	end
end

local near = 8 -- only so many waiters get the deadline of their rank

-- renew records a heartbeat of a waiter. It sets the deadline that Redisson would compute if
-- all waiters up to this one came now with the default wait. A waiter far from the head gets
-- the deadline of a new one: that is later, and needs no search.
function positions.renew(q, waiter)
	local rank = redis.call('LPOS', q.list, waiter, 'MAXLEN', near) or redis.call('LLEN', q.list)
	redis.call('ZADD', q.heartbeats, q.now + q.position_ttl, waiter)
	redis.call('ZADD', q.deadlines, q.now + q.ttl + (rank + 1) * q.wait, waiter)
	q.renewed = true
end

-- restore puts a waiter of ours back at the head if it is alive but not in the list. Then a
-- Java client with a longer wait or another clock has evicted it, and always from the head.
function positions.restore(q, waiter)
	local heartbeat = redis.call('ZSCORE', q.heartbeats, waiter)
	if heartbeat and tonumber(heartbeat) > q.now and not positions.queued(q, waiter) then
		redis.call('LPUSH', q.list, waiter)
		positions.renew(q, waiter)
	end
end

-- leave removes waiters of ours. They may be gone already.
function positions.leave(q, ...)
	redis.call('ZREM', q.heartbeats, ...)
	if redis.call('ZREM', q.deadlines, ...) > 0 or not q.intact then
		for _, waiter in ipairs({...}) do
			redis.call('LREM', q.list, 1, waiter)
		end
	end
end

-- set_expiry gives the keys of the queue an expiry, so that they disappear if all of its
-- processes die. Redisson's keys have none, so a queue with a Java waiter has none either.
local function set_expiry(q)
	local expiry = (redis.call('LLEN', q.list) + 1) * q.wait + q.ttl
	-- A waiter that Java has evicted can hide a Java waiter here, until its next heartbeat.
	-- pcall: if this is forbidden, the keys are like Redisson's.
	if redis.call('ZCARD', q.deadlines) == redis.call('ZCARD', q.heartbeats) then
		redis.pcall('PEXPIRE', q.list, expiry)
		redis.pcall('PEXPIRE', q.deadlines, expiry)
	else
		redis.pcall('PERSIST', q.list)
		redis.pcall('PERSIST', q.deadlines)
	end
	redis.pcall('PEXPIRE', q.heartbeats, expiry)
end

local poll = 5000 -- a waiter makes an attempt after so many ms without a message

-- close ends a script that may have changed the queue, and returns the number of receivers
-- of its message. It deletes the keys of an empty queue. It publishes to a new head if the
-- lock is free, or will be before the new head polls.
function positions.close(q, publish, channel, payload)
	local head = positions.head(q)
	if not head then
		redis.call('DEL', q.list, q.deadlines, q.heartbeats)
		return 0
	end
	-- Without heartbeats all waiters are Java's: none of ours will remove the expiry later.
	if q.renewed or redis.call('EXISTS', q.heartbeats) == 0 then
		set_expiry(q)
	end
	local receivers
	if (q.freed or q.head and q.head ~= head) and q.expires and q.ttl < poll then
		-- pcall: all the rest is done even for a user who may not publish, and waiters poll.
		receivers = redis.pcall(publish, channel .. ':' .. head, payload)
	end
	return type(receivers) == 'number' and receivers or 0
end

-- The result of an attempt, and in how many ms another one may succeed, -1 if that is
-- unknown.
positions.acquired = {0, 0}

function positions.refused(q)
	return {1, q.expires and not q.free and q.ttl or -1}
end

-- enqueue records a heartbeat of a waiter, and adds it to the end of the list if it is not
-- there. The result is 2 if it was there, 3 if not. Only the head learns when the lease
-- ends: another waiter would poll in vain.
function positions.enqueue(q, waiter)
	local queued = positions.queued(q, waiter)
	positions.renew(q, waiter)
	if not queued then
		-- RPUSH comes last: a waiter in the list without times would stay there for long.
		redis.call('RPUSH', q.list, waiter)
	end
	return {queued and 2 or 3, positions.head(q) == waiter and positions.refused(q)[2] or -1}
end

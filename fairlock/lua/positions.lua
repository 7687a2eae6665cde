-- Functions for the queue of a fair lock. Go puts this file before each script.
--
-- A waiter has a position in a list and two times, in ms of the server's clock. Its
-- deadline is in a sorted set of Redisson's. The time until which its last heartbeat
-- counts is in another sorted set, which only redlatch knows. A waiter without a
-- heartbeat waits in Java, and only its deadline tells when to drop it. The deadline of
-- our own waiter only keeps Redisson from evicting it, so it is far ahead: one wait for
-- each position, as Redisson computes it.
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
		new_head = false, -- the head of the list has changed
		renewed = false, -- a position was added or renewed
	}
	-- A key of another type is an error here, before anything is changed.
	redis.call('LLEN', q.list)
	redis.call('ZCARD', q.deadlines)
	redis.call('ZCARD', q.heartbeats)
	local time = redis.call('TIME')
	q.now = time[1] * 1000 + math.floor(time[2] / 1000)
	local lease = redis.call('PTTL', q.lock)
	q.free, q.expires, q.ttl = lease == -2, lease ~= -1, math.max(lease, 0)
	return q
end

-- taken and freed record what the script has done to the lock.
function positions.taken(q, ttl)
	q.free, q.expires, q.ttl = false, true, tonumber(ttl)
end

function positions.freed(q)
	q.free, q.expires, q.ttl, q.new_head = true, true, 0, true
end

function positions.head(q)
	return redis.call('LINDEX', q.list, 0)
end

-- all_ours reports whether no waiter is in Java: there are as many deadlines as
-- heartbeats. A waiter of ours that Java has evicted can hide a Java waiter until its next
-- heartbeat.
local function all_ours(q)
	return redis.call('ZCARD', q.deadlines) == redis.call('ZCARD', q.heartbeats)
end

-- subtract_waits lowers the deadlines of Java's waiters from the given rank on, counted
-- from 0, after n of our waiters before them have left. Each Java waiter derived its
-- deadline from the one before it. Our own deadlines are set by each heartbeat.
--
-- Redisson subtracts the wait of the client that acquires the lock instead of what that
-- client had added, so a long wait pushes other deadlines into the past. This function
-- subtracts exactly what was added, and leaves at least the deadline of a waiter at the
-- head.
local function subtract_waits(q, n, rank)
	if all_ours(q) then
		return
	end
	local least = q.now + q.ttl + q.wait
	for _, waiter in ipairs(redis.call('LRANGE', q.list, rank, -1)) do
		local deadline = tonumber(redis.call('ZSCORE', q.deadlines, waiter) or 0)
		if deadline > least and not redis.call('ZSCORE', q.heartbeats, waiter) then
			redis.call('ZADD', q.deadlines, math.max(deadline - n * q.wait, least), waiter)
		end
	end
end

-- purge removes dead waiters from the head of the list. It does not fail for lack of
-- memory.
function positions.purge(q)
	local ours = 0
	while true do
		local waiter = positions.head(q)
		if not waiter then
			break
		end
		-- The deadline of our own waiter does not count: Java may have pushed it into
		-- the past.
		local heartbeat = redis.call('ZSCORE', q.heartbeats, waiter)
		local dies = tonumber(heartbeat or redis.call('ZSCORE', q.deadlines, waiter))
		if not dies then
			-- Redisson would never evict it. pcall: the next request can do this.
			redis.pcall('ZADD', q.deadlines, q.now + q.wait, waiter)
			break
		end
		if dies > q.now then
			break
		end
		redis.call('LPOP', q.list)
		redis.call('ZREM', q.deadlines, waiter)
		redis.call('ZREM', q.heartbeats, waiter)
		q.new_head = true
		if heartbeat then
			ours = ours + 1
		end
	end
	if ours > 0 then
		subtract_waits(q, ours, 0)
	end
end

-- renew records a heartbeat of the waiter at a rank, counted from 1. It sets the deadline
-- that Redisson would compute if all waiters up to this one came now with the default wait.
function positions.renew(q, waiter, rank)
	redis.call('ZADD', q.heartbeats, q.now + q.position_ttl, waiter)
	redis.call('ZADD', q.deadlines, q.now + q.ttl + rank * q.wait, waiter)
	q.renewed = true
end

-- evicted reports whether a waiter of ours is alive but not in the list. Then a Java client
-- with a longer wait or another clock has removed it, and always from the head.
function positions.evicted(q, waiter)
	local dies = redis.call('ZSCORE', q.heartbeats, waiter)
	return dies and tonumber(dies) > q.now and not redis.call('LPOS', q.list, waiter)
end

-- restore puts an evicted waiter back at the head.
function positions.restore(q, waiter)
	positions.renew(q, waiter, 1)
	redis.call('LPUSH', q.list, waiter)
	q.new_head = true
end

-- leave removes a waiter of ours and reports whether it was in the list.
function positions.leave(q, waiter)
	local rank = redis.call('LPOS', q.list, waiter)
	redis.call('ZREM', q.heartbeats, waiter)
	redis.call('ZREM', q.deadlines, waiter)
	if not rank then
		return false
	end
	redis.call('LREM', q.list, 1, waiter)
	if rank == 0 then
		q.new_head = true
	end
	subtract_waits(q, 1, rank)
	return true
end

-- set_expiry gives the keys of the queue an expiry, so that they disappear if all of its
-- processes die. Redisson's keys have none, so a queue with a Java waiter has none either.
local function set_expiry(q)
	local expiry = (redis.call('LLEN', q.list) + 1) * q.wait + q.ttl
	-- pcall: if this is forbidden, the keys are like Redisson's.
	if all_ours(q) then
		redis.pcall('PEXPIRE', q.list, expiry)
		redis.pcall('PEXPIRE', q.deadlines, expiry)
	else
		redis.pcall('PERSIST', q.list)
		redis.pcall('PERSIST', q.deadlines)
	end
	redis.pcall('PEXPIRE', q.heartbeats, expiry)
end

-- Without a message a waiter polls after this time, in ms.
local poll = 5000

-- close ends a script that may have changed the queue, and returns the number of receivers
-- of its message. It deletes the keys of an empty queue. It publishes to a new head if the
-- lock is free, or will be before the new head polls: until now that has waited for the
-- death of the waiter before it.
function positions.close(q, publish, channel, payload)
	local head = positions.head(q)
	if not head then
		redis.call('DEL', q.list, q.deadlines, q.heartbeats)
		return 0
	end
	if q.renewed then
		set_expiry(q)
	end
	if not (q.new_head and q.expires and q.ttl < poll) then
		return 0
	end
	-- pcall: all the rest is done even for a user who may not publish, and waiters poll.
	local receivers = redis.pcall(publish, channel .. ':' .. head, payload)
	return type(receivers) == 'number' and receivers or 0
end

-- Only this many waiters, from the head on, get an eta: the others would poll in vain.
local etas = 8

-- eta returns in how many ms the waiter at a rank, counted from 0, may acquire the lock if
-- there is no renewal, release or heartbeat until then; -1 if that is unknown.
local function eta(q, rank)
	if rank >= etas or not q.expires then
		return -1
	end
	local at = q.now + q.ttl
	if rank > 0 then
		for _, waiter in ipairs(redis.call('LRANGE', q.list, 0, rank - 1)) do
			local dies = redis.call('ZSCORE', q.heartbeats, waiter) or redis.call('ZSCORE', q.deadlines, waiter)
			if not dies then
				return -1
			end
			at = math.max(at, tonumber(dies))
		end
	end
	return at - q.now
end

-- The result of an attempt, and in how many ms another one may succeed, -1 if that is
-- unknown.
positions.acquired = {0, 0}

function positions.refused(q)
	return {1, q.expires and not q.free and q.ttl or -1}
end

-- enqueue records a heartbeat of a waiter, and adds it to the end of the list if it is not
-- there. The result is 2 if it was there, 3 if not.
function positions.enqueue(q, waiter)
	local rank = redis.call('LPOS', q.list, waiter)
	if rank then
		positions.renew(q, waiter, rank + 1)
		return {2, eta(q, rank)}
	end
	rank = redis.call('LLEN', q.list)
	-- RPUSH comes last: a waiter in the list without times would stay there for long.
	positions.renew(q, waiter, rank + 1)
	redis.call('RPUSH', q.list, waiter)
	return {3, eta(q, rank)}
end

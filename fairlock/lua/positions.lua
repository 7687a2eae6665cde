-- Functions for the queue of a fair lock. Go puts this file before each script.
--
-- A waiter has a position in a list and two times, in ms of the server's clock. Its
-- deadline is in a sorted set of Redisson's. The time until which its last heartbeat
-- counts is in a sorted set that only redlatch knows. A waiter without a heartbeat waits
-- in Java, and is dropped at its deadline. The deadline of our own waiter only keeps
-- Redisson from evicting it: it is one wait for each position ahead, or more.
--
-- Java can evict a live waiter. So another sorted set of redlatch has the order in which our
-- waiters came. Its member '' has the negative time until which no waiter is dropped.
--
-- Whoever can write to these keys can make them as large as the server allows. So a queue has a
-- maximum length, beyond which every script fails before its first write, and a script removes or moves a limited
-- number of waiters.
local positions = {}

-- If the keys do not fit together a script reads the whole list, and Lua is slow with many names.
local most, most_unfit = 65535, 10000
local most_dead = 1000 -- so many dead waiters are removed from the list, and so many from the order
local most_moved = 1000

-- The error of a script for a queue with too many waiters.
positions.too_many = 'The fair lock has more than ' .. most .. ' waiters, or ' .. most_unfit
	.. ' whose times are missing'

-- open reads the state that the other functions use. first is the index in KEYS of the
-- lock hash, which the list, the deadlines, the heartbeats and the order follow. wait is Redisson's
-- fairLockWaitTimeout, and ttl is how long a heartbeat keeps a position, both in ms.
function positions.open(first, wait, ttl)
	local q = {
		lock = KEYS[first],
		list = KEYS[first + 1],
		deadlines = KEYS[first + 2],
		heartbeats = KEYS[first + 3],
		order = KEYS[first + 4],
		wait = tonumber(wait),
		position_ttl = tonumber(ttl),
	}
	-- A key of another type is an error here, before anything is changed.
	q.head = positions.head(q)
	-- Every waiter in the list has a deadline, unless a key was changed by hand.
	q.length = redis.call('LLEN', q.list)
	q.intact = q.length == redis.call('ZCARD', q.deadlines)
	q.most = q.intact and most or most_unfit
	if q.length > q.most then
		error(positions.too_many, 0)
	end
	redis.call('ZCARD', q.heartbeats)
	local patience = redis.call('ZSCORE', q.order, '')
	local time = redis.call('TIME')
	q.now = time[1] * 1000 + math.floor(time[2] / 1000)
	q.patient = patience and -patience > q.now
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

-- listed records that a waiter was put into the list, or taken from it with by = -1.
local function listed(q, waiter, by)
	if q.members then
		q.members[waiter] = (q.members[waiter] or 0) + by
	end
end

-- queued reports whether a waiter is in the list. It reads the list, once, only if it must.
function positions.queued(q, waiter)
	if q.intact then
		return redis.call('ZSCORE', q.deadlines, waiter)
	end
	if not q.members then
		q.members = {}
		for _, member in ipairs(redis.call('LRANGE', q.list, 0, -1)) do
			listed(q, member, 1)
		end
	end
	return (q.members[waiter] or 0) > 0
end

-- all_queued reports that of each of some waiters.
function positions.all_queued(q, waiters)
	if q.intact and #waiters > 0 then
		return redis.call('ZMSCORE', q.deadlines, unpack(waiters))
	end
	local queued = {}
	for i, waiter in ipairs(waiters) do
		queued[i] = positions.queued(q, waiter)
	end
	return queued
end

-- fits fails unless there is room for waiters that may be in the list already.
function positions.fits(q, waiters)
	local length = q.length
	if length + #waiters <= q.most then
		return
	end
	for i, queued in ipairs(positions.all_queued(q, waiters)) do
		length = length + (queued and 0 or 1)
	end
	if length > q.most then
		error(positions.too_many, 0)
	end
end

-- dies returns when a waiter counts as dead, or nil. The deadline of our own waiter does not
-- count: Java may have pushed it into the past.
function positions.dies(q, waiter)
	return tonumber(redis.call('ZSCORE', q.heartbeats, waiter) or redis.call('ZSCORE', q.deadlines, waiter))
end

-- next returns the waiter that the lock is for, or nil.
function positions.next(q)
	return not q.silent and positions.head(q)
end

-- listen is told the waiters of a request, which are alive. If one of them counted as dead, or
-- there was none that did not, heartbeats have been lost: those of others may be on their
-- way. So no waiter is dropped for a while, which is less than the time between heartbeats.
local function listen(q, live)
	-- The queue is silent if all waiters are ours, and none of them was heard in time. They
	-- may all have died, or the server may have been away. Those in the order are counted:
	-- evicted has forgotten the dead there, but a heartbeat can outlive its rank and its waiter.
	local heard = redis.call('ZRANGE', q.heartbeats, -1, -1, 'WITHSCORES')[2]
	q.silent = heard and tonumber(heard) <= q.now
		and redis.call('ZCARD', q.order) - (redis.call('ZSCORE', q.order, '') and 1 or 0) >= redis.call('ZCARD', q.deadlines)
	if #live == 0 then
		return
	end
	local late = q.silent
	for _, heartbeat in ipairs(redis.call('ZMSCORE', q.heartbeats, unpack(live))) do
		late = late or heartbeat and tonumber(heartbeat) <= q.now
	end
	if late then
		redis.call('ZADD', q.order, -(q.now + math.floor(q.position_ttl / 4)), '')
		q.silent, q.patient, q.changed = false, true, true
	end
end

-- purge removes dead waiters from the head of the list. Only a free lock needs that. It does
-- not fail for lack of memory. It notes whether the next script has to go on.
local function purge(q)
	local waiter, removed = positions.head(q), 0
	while waiter do
		local dies = positions.dies(q, waiter)
		if not dies then
			-- Redisson would never evict it. pcall: the next request can do this.
			redis.pcall('ZADD', q.deadlines, q.now + q.wait, waiter)
		end
		if not q.free or q.silent or q.patient or not dies or dies > q.now then
			break
		end
		if removed == most_dead then
			q.unfinished = true
			break
		end
		removed = removed + 1
		redis.call('LPOP', q.list)
		listed(q, waiter, -1)
		redis.call('ZREM', q.deadlines, waiter)
		redis.call('ZREM', q.heartbeats, waiter)
		redis.call('ZREM', q.order, waiter)
		waiter = positions.head(q)
	end
end

local function rank(q, waiter)
	return waiter and tonumber(redis.call('ZSCORE', q.order, waiter))
end

local some = 16 -- so many waiters of other requests are put back at most

-- evicted returns waiters that are alive although Java has evicted them, and their ranks: all
-- those of a request, and the first others. It forgets dead ones.
local function evicted(q, live)
	local found, seen = {}, {}
	local function add(waiter)
		local alive = (positions.dies(q, waiter) or 0) > q.now
		if alive and not seen[waiter] then
			found[#found + 1], seen[waiter] = {waiter, rank(q, waiter) or 0}, true
		end
		return alive
	end
	local queued = positions.all_queued(q, live)
	for i, waiter in ipairs(live) do
		if not queued[i] then
			add(waiter)
		end
	end
	local all = 0
	repeat
		local first, forgotten = redis.call('ZRANGEBYSCORE', q.order, 0, '+inf', 'LIMIT', 0, some), 0
		for _, waiter in ipairs(first) do
			if positions.queued(q, waiter) then
				break -- it was evicted from the head, if at all, and so are those that came later
			end
			if not add(waiter) then
				forgotten = forgotten + redis.call('ZREM', q.order, waiter)
				redis.call('ZREM', q.heartbeats, waiter)
			end
		end
		all = all + forgotten
	until forgotten < some or all >= most_dead
	return found
end

-- restore puts evicted waiters back at the head: that is where they were. Those of ours that
-- came earlier, and are back already, go before them.
local function restore(q, back)
	if #back == 0 then
		return
	end
	-- On a server out of memory a script may go on once it has executed a write that needs no
	-- memory. This one has no other effect.
	redis.call('ZREM', q.heartbeats, '')
	local function earlier(a, b) return a[2] < b[2] or a[2] == b[2] and a[1] < b[1] end
	table.sort(back, earlier)
	local last, head, moved = back[#back][2], positions.head(q), 0
	while moved < most_moved and (rank(q, head) or last) < last do
		redis.call('LPOP', q.list)
		listed(q, head, -1)
		back[#back + 1], moved = {head, rank(q, head)}, moved + 1
		head = positions.head(q)
	end
	table.sort(back, earlier)
	for i = #back, 1, -1 do
		redis.call('LPUSH', q.list, back[i][1])
		listed(q, back[i][1], 1)
		redis.call('ZADD', q.deadlines, q.now + q.ttl + i * q.wait, back[i][1])
	end
	q.changed = true
end

-- refresh brings the list up to date. live are the waiters of the request. Their heartbeats
-- count from now on: renew and enqueue record them.
function positions.refresh(q, live)
	local back = evicted(q, live)
	listen(q, live)
	restore(q, back)
	purge(q)
end

local near = 8 -- only so many waiters get the deadline of their rank

-- renew records heartbeats of waiters. It sets the deadline that Redisson would compute if
-- all waiters up to this one came now with the default wait. A waiter far from the head gets
-- the deadline of a new one: that is later, and needs no search.
function positions.renew(q, waiters)
	local ranks, last = {}, redis.call('LLEN', q.list) + 1
	for i, waiter in ipairs(redis.call('LRANGE', q.list, 0, near - 1)) do
		ranks[waiter] = i
	end
	local heartbeats, deadlines = {}, {}
	for i, waiter in ipairs(waiters) do
		heartbeats[2 * i - 1], heartbeats[2 * i] = q.now + q.position_ttl, waiter
		deadlines[2 * i - 1], deadlines[2 * i] = q.now + q.ttl + (ranks[waiter] or last) * q.wait, waiter
	end
	redis.call('ZADD', q.heartbeats, unpack(heartbeats))
	redis.call('ZADD', q.deadlines, unpack(deadlines))
	q.changed = true
end

-- leave removes waiters of ours. They may be gone already.
function positions.leave(q, ...)
	redis.call('ZREM', q.heartbeats, ...)
	redis.call('ZREM', q.order, ...)
	if redis.call('ZREM', q.deadlines, ...) > 0 or not q.intact then
		for _, waiter in ipairs({...}) do
			if q.intact or positions.queued(q, waiter) then
				listed(q, waiter, -redis.call('LREM', q.list, 1, waiter))
			end
		end
	end
end

-- set_expiry gives the keys of the queue an expiry, so that they disappear if all of its
-- processes die. Redisson's keys have none, so a queue with a Java waiter has none either.
-- pcall: if this is forbidden, the keys are like Redisson's.
local function set_expiry(q, expiry)
	-- A waiter that Java has evicted can hide a Java waiter here, until its next heartbeat.
	if redis.call('ZCARD', q.deadlines) == redis.call('ZCARD', q.heartbeats) then
		redis.pcall('PEXPIRE', q.list, expiry)
		redis.pcall('PEXPIRE', q.deadlines, expiry)
	else
		redis.pcall('PERSIST', q.list)
		redis.pcall('PERSIST', q.deadlines)
	end
	redis.pcall('PEXPIRE', q.heartbeats, expiry)
	redis.pcall('PEXPIRE', q.order, expiry)
end

local poll = 5000 -- a waiter makes an attempt after so many ms without a message

-- close ends a script that may have changed the queue, and returns the number of receivers
-- of its message. It deletes the keys of an empty queue. It publishes to a new head if the
-- lock is free, or will be before the new head polls.
function positions.close(q, publish, channel, payload)
	local head = positions.head(q)
	if not head then
		redis.call('DEL', q.list, q.deadlines, q.heartbeats, q.order)
		return 0
	end
	local ours = redis.call('EXISTS', q.heartbeats) == 1
	if not ours then
		redis.call('DEL', q.order)
	end
	if q.silent and q.free then
		-- If the waiters are dead nobody would drop them.
		if redis.call('PTTL', q.list) > q.position_ttl then
			set_expiry(q, q.position_ttl)
		end
	elseif q.changed or not ours then -- none of ours will remove the expiry later
		set_expiry(q, (redis.call('LLEN', q.list) + 1) * q.wait + q.ttl)
	end
	local receivers
	if (q.freed or q.head and q.head ~= head) and q.expires and q.ttl < poll then
		-- pcall: all the rest is done even for a user who may not publish, and waiters poll.
		receivers = redis.pcall(publish, channel .. ':' .. head, payload)
	end
	return type(receivers) == 'number' and receivers or 0
end

-- The result of an attempt, and in how many ms another one may succeed, -1 if that is
-- unknown, -2 if the lock has no expiry.
positions.acquired = {0, 0}

function positions.refused(q)
	return {1, not q.expires and -2 or q.free and -1 or q.ttl}
end

-- enqueue records a heartbeat of a waiter, and adds it to the end of the list if it is not
-- there. The result is 2 if it was there, 3 if not. Only the head learns when the lease
-- ends: another waiter would poll in vain. All learn that it does not end. While dead ones are at the head each
-- waiter goes on with them.
function positions.enqueue(q, waiter)
	local queued = positions.queued(q, waiter)
	positions.renew(q, {waiter})
	if not queued then
		local last = redis.call('ZRANGE', q.order, -1, -1, 'WITHSCORES')[2] or 0
		redis.call('ZADD', q.order, math.max(last, 0) + 1, waiter)
		-- RPUSH comes last: a waiter in the list without times would stay there for long.
		redis.call('RPUSH', q.list, waiter)
		listed(q, waiter, 1)
	end
	if q.unfinished then
		return {queued and 2 or 3, 1}
	end
	local first = positions.head(q) == waiter
	return {queued and 2 or 3, (first or not q.expires) and positions.refused(q)[2] or -1}
end

-- What the scripts of a fair lock share; it stands before each of them.
--
-- Who waits has a place in a list, and two times in ms of the server's clock: a
-- deadline in one sorted set, as Redisson has it, and in another one, which
-- Redisson does not know, when it is taken for dead unless it gives a sign of life
-- before. Whoever is not in the latter waits in Java and gives no signs; its
-- deadline is all there is to go by. For ours it only tells Redisson not to evict
-- them, so it is kept far ahead: by a wait for every place, as Redisson reckons.
local places = {}

-- open reads what everything else here goes by. first is where in KEYS the lock
-- hash, the list, the deadlines and the signs of life begin; wait is Redisson's
-- fairLockWaitTimeout in ms.
function places.open(first, wait)
	local q = {
		lock = KEYS[first],
		list = KEYS[first + 1],
		deadlines = KEYS[first + 2],
		alive = KEYS[first + 3],
		wait = tonumber(wait),
		moved = false, -- whether another one than before is at the head
		stated = false, -- whether a place was made or kept
	}
	-- A key of another type is an error here, before anything is changed.
	redis.call('LLEN', q.list)
	redis.call('ZCARD', q.deadlines)
	redis.call('ZCARD', q.alive)
	local time = redis.call('TIME')
	q.now = time[1] * 1000 + math.floor(time[2] / 1000)
	local ttl = redis.call('PTTL', q.lock)
	q.free, q.expires, q.ttl = ttl == -2, ttl ~= -1, math.max(ttl, 0)
	return q
end

-- taken and freed note what the script has done to the lock.
function places.taken(q, ttl)
	q.free, q.expires, q.ttl = false, true, tonumber(ttl)
end

function places.freed(q)
	q.free, q.expires, q.ttl, q.moved = true, true, 0, true
end

function places.head(q)
	return redis.call('LINDEX', q.list, 0)
end

-- With as many deadlines as signs of life nobody waits in Java. One of ours that a
-- Java peer has evicted can hide one of theirs, until its next sign of life.
local function all_ours(q)
	return redis.call('ZCARD', q.deadlines) == redis.call('ZCARD', q.alive)
end

-- take_back lowers the deadlines that include n waits of ours who have left from
-- before the given place, counted from 0: those of Java's waiters, who added
-- theirs to that of the one before. Ours are stated anew with each sign of life.
--
-- Redisson subtracts the wait of whoever acquires, not what that one had added, so
-- that a long wait pushes others into the past and they are evicted. Here exactly
-- what was added is taken back, and never so much that less is left than a waiter
-- who came first would have.
local function take_back(q, n, place)
	if all_ours(q) then
		return
	end
	local least = q.now + q.ttl + q.wait
	for _, owner in ipairs(redis.call('LRANGE', q.list, place, -1)) do
		local deadline = tonumber(redis.call('ZSCORE', q.deadlines, owner) or 0)
		if deadline > least and not redis.call('ZSCORE', q.alive, owner) then
			redis.call('ZADD', q.deadlines, math.max(deadline - n * q.wait, least), owner)
		end
	end
end

-- purge takes the dead off the head of the list. It does not fail for a lack of
-- memory.
function places.purge(q)
	local ours = 0
	while true do
		local owner = places.head(q)
		if not owner then
			break
		end
		-- The deadline of ours does not count: a Java peer may have pushed it into
		-- the past.
		local alive = redis.call('ZSCORE', q.alive, owner)
		local dies = tonumber(alive or redis.call('ZSCORE', q.deadlines, owner))
		if not dies then
			-- Redisson would never evict it. pcall: it can be done next time.
			redis.pcall('ZADD', q.deadlines, q.now + q.wait, owner)
			break
		end
		if dies > q.now then
			break
		end
		redis.call('LPOP', q.list)
		redis.call('ZREM', q.deadlines, owner)
		redis.call('ZREM', q.alive, owner)
		q.moved = true
		if alive then
			ours = ours + 1
		end
	end
	if ours > 0 then
		take_back(q, ours, 0)
	end
end

-- state gives the waiter at a place, counted from 1, life ms more to live, and the
-- deadline that it would have by Redisson's reckoning if everybody before it came
-- now and waited for the default time.
function places.state(q, owner, place, life)
	redis.call('ZADD', q.alive, q.now + life, owner)
	redis.call('ZADD', q.deadlines, q.now + q.ttl + place * q.wait, owner)
	q.stated = true
end

-- evicted tells whether a waiter of ours is alive and not in the list. Then it was
-- a Java peer who took it out, with a longer wait than ours or another clock, and
-- from the head, as always.
function places.evicted(q, owner)
	local dies = redis.call('ZSCORE', q.alive, owner)
	return dies and tonumber(dies) > q.now and not redis.call('LPOS', q.list, owner)
end

-- restore undoes that.
function places.restore(q, owner, life)
	places.state(q, owner, 1, life)
	redis.call('LPUSH', q.list, owner)
	q.moved = true
end

-- leave gives up the place of a waiter of ours and tells whether it had one.
function places.leave(q, owner)
	local place = redis.call('LPOS', q.list, owner)
	redis.call('ZREM', q.alive, owner)
	redis.call('ZREM', q.deadlines, owner)
	if not place then
		return false
	end
	redis.call('LREM', q.list, 1, owner)
	if place == 0 then
		q.moved = true
	end
	take_back(q, 1, place)
	return true
end

-- bound sees to it that a queue whose processes have all died does not stay for
-- ever. Redisson's have no expiry, so one with a waiter of theirs has none either.
local function bound(q)
	local life = (redis.call('LLEN', q.list) + 1) * q.wait + q.ttl
	-- pcall: without it they are as Redisson's.
	if all_ours(q) then
		redis.pcall('PEXPIRE', q.list, life)
		redis.pcall('PEXPIRE', q.deadlines, life)
	else
		redis.pcall('PERSIST', q.list)
		redis.pcall('PERSIST', q.deadlines)
	end
	redis.pcall('PEXPIRE', q.alive, life)
end

-- A waiter looks again after this time, in ms, whatever it was told.
local poll = 5000

-- close ends a script that may have changed something: it tells a new head if the
-- lock is free, or will be before it looks again: so far it has gone by the life of
-- the one before it. It leaves no key of an empty queue, and returns how many
-- subscribers were told.
function places.close(q, publish, channel, payload)
	local owner = places.head(q)
	if not owner then
		redis.call('DEL', q.list, q.deadlines, q.alive)
		return 0
	end
	if q.stated then
		bound(q)
	end
	if not (q.moved and q.expires and q.ttl < poll) then
		return 0
	end
	-- pcall: who may not publish has done the rest all the same, and waiters poll.
	local told = redis.pcall(publish, channel .. ':' .. owner, payload)
	return type(told) == 'number' and told or 0
end

-- How many from the head are told when it may be their turn: the others would look
-- in vain.
local foresight = 8

-- turn returns in how many ms it may be the turn of a waiter, at a place counted
-- from 0, if nobody renews or releases the lock or gives a sign of life; -1 if
-- that is not known.
local function turn(q, place)
	if place >= foresight or not q.expires then
		return -1
	end
	local at = q.now + q.ttl
	if place > 0 then
		for _, owner in ipairs(redis.call('LRANGE', q.list, 0, place - 1)) do
			local dies = redis.call('ZSCORE', q.alive, owner) or redis.call('ZSCORE', q.deadlines, owner)
			if not dies then
				return -1
			end
			at = math.max(at, tonumber(dies))
		end
	end
	return at - q.now
end

-- What an attempt has come to, and in how many ms the next one may do better, -1
-- if that is not known.
places.acquired = {0, 0}

function places.refused(q)
	return {1, q and q.expires and not q.free and q.ttl or -1}
end

-- wait gives a sign of life for a waiter of ours, and a place behind all others if
-- it has none: 2 if it has had one, 3 if not.
function places.wait(q, owner, life)
	local place = redis.call('LPOS', q.list, owner)
	if place then
		places.state(q, owner, place + 1, life)
		return {2, turn(q, place)}
	end
	place = redis.call('LLEN', q.list)
	-- The list comes last: who is in it without times would be there for long.
	places.state(q, owner, place + 1, life)
	redis.call('RPUSH', q.list, owner)
	return {3, turn(q, place)}
end

-- held by this owner, who must not take it again
places.reentered = {4, -1}

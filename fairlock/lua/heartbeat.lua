-- Renews the queue positions of live waiters.
-- KEYS[4l-3..4l]  keys of the l-th lock, as in acquire.lua
-- ARGV[1]         Redisson's fairLockWaitTimeout in ms
-- ARGV[2]         how long a heartbeat keeps a position, in ms
-- ARGV[3]         command that publishes
-- ARGV[4]         payload
-- ARGV[5..]       for each lock its channel, the number of its claims, and the claims
-- Reply: for each claim 1 if it is in the queue and must keep waiting; 0 if it is not in
-- the queue, or can acquire the lock now.

local reply = {}

-- ranks returns the rank of each waiter in the list, from 1.
local function ranks(q)
	local rank = {}
	for i, waiter in ipairs(redis.call('LRANGE', q.list, 0, -1)) do
		rank[waiter] = i
	end
	return rank
end

-- heartbeat serves the claims from ARGV[first] to ARGV[last].
local function heartbeat(q, channel, first, last)
	-- On a server out of memory a script may go on once it has executed a write that needs
	-- no memory, and the writes below need hardly any. This one has no other effect.
	redis.call('ZREM', q.heartbeats, '')
	positions.purge(q)
	local rank, restored = ranks(q), false
	for i = last, first, -1 do -- backward, so that the first one ends up at the head
		if not rank[ARGV[i]] and positions.evicted(q, ARGV[i]) then
			positions.restore(q, ARGV[i])
			restored = true
		end
	end
	if restored then
		rank = ranks(q)
	end
	for i = first, last do
		local claim = ARGV[i]
		if rank[claim] then
			positions.renew(q, claim, rank[claim])
		end
		-- The head of a free lock may have missed its message. Its client does not poll
		-- for it if it believes that another of its waiters is first, which happens after
		-- a late request or an eviction.
		reply[#reply + 1] = rank[claim] and not (q.free and rank[claim] == 1) and 1 or 0
	end
	for _, waiter in ipairs(redis.call('ZRANGEBYSCORE', q.heartbeats, '-inf', q.now)) do
		if not rank[waiter] then -- evicted, and dead
			redis.call('ZREM', q.heartbeats, waiter)
		end
	end
	positions.close(q, ARGV[3], channel, ARGV[4])
end

local at = 5
for l = 1, #KEYS / 4 do
	local first = at + 2
	local last = at + 1 + ARGV[at + 1]
	-- pcall: a key of another type means that this queue is empty, and must not fail the
	-- rest of the batch. If the server refuses to write, no position is lost.
	local opened, q = pcall(positions.open, 4 * l - 3, ARGV[1], ARGV[2])
	if opened then
		heartbeat(q, ARGV[at], first, last)
	elseif not string.find(type(q) == 'table' and q.err or q, 'WRONGTYPE') then
		error(q)
	else
		for _ = first, last do
			reply[#reply + 1] = 0
		end
	end
	at = last + 1
end
return reply

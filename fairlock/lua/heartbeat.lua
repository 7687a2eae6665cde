-- Renews the queue positions of live waiters.
-- KEYS[5l-4..5l]  keys of the l-th lock, as in acquire.lua
-- ARGV[1]         Redisson's fairLockWaitTimeout in ms
-- ARGV[2]         how long a heartbeat keeps a position, in ms
-- ARGV[3]         command that publishes
-- ARGV[4]         payload
-- ARGV[5..]       for each lock its channel, the number of its claims, and the claims
-- Reply: for each claim 1 if it is in the queue and must keep waiting; 0 if it is not in
-- the queue, or can acquire the lock now, or make an attempt that removes more dead waiters.

local reply = {}

-- heartbeat serves the claims from ARGV[first] to ARGV[last].
local function heartbeat(q, channel, first, last)
	-- On a server out of memory a script may go on once it has executed a write that needs no
	-- memory. This one has no other effect, and the writes below need hardly any memory.
	redis.call('ZREM', q.heartbeats, '')
	local waiters = {unpack(ARGV, first, last)}
	positions.refresh(q, waiters)
	-- The head of a free lock may have missed its message. Its client polls only for the
	-- waiter that it believes to be first, which is another one after an eviction.
	local next = q.free and positions.next(q)
	local renewed, queued = {}, positions.all_queued(q, waiters)
	for i, waiter in ipairs(waiters) do
		if queued[i] then
			renewed[#renewed + 1] = waiter
		end
		reply[#reply + 1] = queued[i] and waiter ~= next and not q.unfinished and 1 or 0
	end
	if #renewed > 0 then
		positions.renew(q, renewed)
	end
	positions.close(q, ARGV[3], channel, ARGV[4])
end

local at = 5
for l = 1, #KEYS / 5 do
	local first = at + 2
	local last = at + 1 + ARGV[at + 1]
	-- pcall: a key of another type means that this queue is empty, and must not fail the
	-- rest of the batch, nor must a queue with too many waiters, which an attempt reports. If the server refuses
	-- to write, no position is lost.
	local opened, q = pcall(positions.open, 5 * l - 4, ARGV[1], ARGV[2])
	local failure = not opened and (type(q) == 'table' and q.err or q)
	if opened then
		heartbeat(q, ARGV[at], first, last)
	elseif not string.find(failure, 'WRONGTYPE') and not string.find(failure, positions.too_many, 1, true) then
		error(q)
	else
		for _ = first, last do
			reply[#reply + 1] = 0
		end
	end
	at = last + 1
end
return reply

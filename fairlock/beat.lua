-- Keeps the places of live waiters.
-- KEYS[4l-3..4l]  those of the l-th lock, as acquire.lua
-- ARGV[1]         Redisson's fairLockWaitTimeout in ms
-- ARGV[2]         how long a place is kept after a sign of life, in ms
-- ARGV[3]         command that publishes
-- ARGV[4]         payload
-- ARGV[5..]       for each lock its channel, the number of its owners, and those
-- Reply: for each owner 1 if it has a place and has to wait on; 0 if it has none, or
-- it is its turn.

local reply = {}

-- order returns the place of each in the list, from 1.
local function order(q)
	local place = {}
	for i, owner in ipairs(redis.call('LRANGE', q.list, 0, -1)) do
		place[owner] = i
	end
	return place
end

-- beat serves the owners from ARGV[first] to ARGV[last].
local function beat(q, channel, first, last)
	-- A server out of memory lets a script go on that has written something that
	-- takes none, and what follows hardly takes any. This has no other effect.
	redis.call('ZREM', q.alive, '')
	places.purge(q)
	local place, restored = order(q), false
	for i = last, first, -1 do -- so that the first comes first
		if not place[ARGV[i]] and places.evicted(q, ARGV[i]) then
			places.restore(q, ARGV[i], ARGV[2])
			restored = true
		end
	end
	if restored then
		place = order(q)
	end
	for i = first, last do
		local owner = ARGV[i]
		if place[owner] then
			places.state(q, owner, place[owner], ARGV[2])
		end
		-- Whose turn it is may not have heard of it, and not look for itself either: a
		-- client takes its waiters to be in the order in which they came, which is not
		-- so after a request that was late, or an eviction.
		reply[#reply + 1] = place[owner] and not (q.free and place[owner] == 1) and 1 or 0
	end
	for _, owner in ipairs(redis.call('ZRANGEBYSCORE', q.alive, '-inf', q.now)) do
		if not place[owner] then -- evicted, and dead
			redis.call('ZREM', q.alive, owner)
		end
	end
	places.close(q, ARGV[3], channel, ARGV[4])
end

local at = 5
for l = 1, #KEYS / 4 do
	local first = at + 2
	local last = at + 1 + ARGV[at + 1]
	-- pcall: a key that has become another type is a queue without places, and must
	-- not take the rest of the batch with it. What a server refuses to write is not lost.
	local opened, q = pcall(places.open, 4 * l - 3, ARGV[1])
	if opened then
		beat(q, ARGV[at], first, last)
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

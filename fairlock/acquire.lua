-- Takes the lock for one of several owners, each made for one acquisition, and
-- gives the others that wait a place.
-- KEYS[1]     lock hash: a field per owner, its value how often that owner holds
-- KEYS[2]     list of who waits, the first first
-- KEYS[3]     sorted set of their deadlines
-- KEYS[4]     sorted set of the signs of life of ours
-- ARGV[1]     Redisson's fairLockWaitTimeout in ms
-- ARGV[2]     how long a place is kept after a sign of life, in ms
-- ARGV[3]     command that publishes
-- ARGV[4]     channel of the lock; that of a waiter is this, a colon and its owner
-- ARGV[5]     payload
-- ARGV[3i+3]  the i-th owner
-- ARGV[3i+4]  lease in ms
-- ARGV[3i+5]  1 if it waits, 0 if this is its only attempt
-- Reply: for each two numbers, see the end of places.lua.

local count = (#ARGV - 5) / 3
local function owner(i) return ARGV[3 * i + 3] end
local function lease(i) return ARGV[3 * i + 4] end
local function waits(i) return ARGV[3 * i + 5] == '1' end

-- take returns what to fail with, if it does; then it has done nothing.
local function take(i)
	redis.call('HSET', KEYS[1], owner(i), 1)
	local expires = redis.pcall('PEXPIRE', KEYS[1], lease(i))
	if expires ~= 1 then -- a user without that right must not take it for ever
		redis.call('DEL', KEYS[1])
		return expires
	end
end

if count == 1 and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) == 0 then
	return take(1) or places.acquired
end

local q = places.open(1, ARGV[1])
local holder -- which of them holds the lock
if not q.free then
	for i = 1, count do
		if redis.call('HEXISTS', KEYS[1], owner(i)) == 1 then
			-- Nobody else has this owner, so an attempt was delivered twice: this one,
			-- or an earlier one of the same wait. The caller counts the lease from
			-- this one.
			holder = i
			if q.ttl < tonumber(lease(i)) then
				redis.call('PEXPIRE', KEYS[1], lease(i))
				places.taken(q, lease(i))
			end
		end
	end
end
places.purge(q)
for i = count, 1, -1 do -- so that the first comes first
	if waits(i) and places.evicted(q, owner(i)) then
		places.restore(q, owner(i), ARGV[2])
	end
end
if q.free then
	local head = places.head(q)
	for i = 1, count do
		if not holder and (not head or head == owner(i)) then
			local failed = take(i)
			if failed then
				return failed
			end
			holder = i
			places.taken(q, lease(i))
		end
	end
end
if holder then
	places.leave(q, owner(holder))
end

local reply = {}
for i = 1, count do
	local answer
	if i == holder then
		answer = places.acquired
	elseif not waits(i) then
		answer = places.refused(q)
	else
		answer = places.wait(q, owner(i), ARGV[2])
	end
	reply[2 * i - 1], reply[2 * i] = answer[1], answer[2]
end
places.close(q, ARGV[3], ARGV[4], ARGV[5])
return reply

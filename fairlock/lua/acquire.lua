-- Takes the lock for one of several claims, and enqueues the others that wait.
-- KEYS[1]     lock hash: a field per claim with the value 1, or per Java thread with the
--             number of its holds
-- KEYS[2]     list of waiters, the first first
-- KEYS[3]     sorted set of their deadlines
-- KEYS[4]     sorted set of the heartbeats of our waiters
-- KEYS[5]     sorted set of their order
-- ARGV[1]     Redisson's fairLockWaitTimeout in ms
-- ARGV[2]     how long a heartbeat keeps a position, in ms
-- ARGV[3]     command that publishes
-- ARGV[4]     channel of the lock; that of a waiter is this, a colon and its claim
-- ARGV[5]     payload
-- ARGV[3i+3]  the i-th claim
-- ARGV[3i+4]  lease in ms
-- ARGV[3i+5]  1 if it waits, 0 if this is its only attempt
-- Reply: two numbers for each claim, see the end of positions.lua.

local count = (#ARGV - 5) / 3
local function claim(i) return ARGV[3 * i + 3] end
local function lease(i) return ARGV[3 * i + 4] end
local function waits(i) return ARGV[3 * i + 5] == '1' end

-- take returns an error if it fails; then it has changed nothing.
local function take(i)
	redis.call('HSET', KEYS[1], claim(i), 1)
	local expires = redis.pcall('PEXPIRE', KEYS[1], lease(i))
	if expires ~= 1 then -- a user who may not call PEXPIRE must not take it for ever
		redis.call('DEL', KEYS[1])
		return expires
	end
end

if count == 1 and redis.call('EXISTS', unpack(KEYS)) == 0 then
	return take(1) or positions.acquired
end

local q = positions.open(1, ARGV[1], ARGV[2])
local holder -- index of the claim that holds the lock
local live = {}
for i = 1, count do
	if waits(i) then
		live[#live + 1] = claim(i)
	end
	if not q.free and redis.call('HEXISTS', KEYS[1], claim(i)) == 1 then
		-- This attempt, or an earlier one of the same wait, was delivered twice. The caller
		-- counts the lease from this one.
		holder = i
		positions.extend(q, lease(i))
	end
end
if not q.free and not holder and not kinds.of(KEYS[1], redis.call('HLEN', KEYS[1])) then
	return kinds.foreign()
end
positions.fits(q, live)
positions.refresh(q, live)
local next = positions.next(q)
for i = 1, count do
	if q.free and (not next or next == claim(i)) then
		local failed = take(i)
		if failed then
			return failed
		end
		holder = i
		positions.taken(q, lease(i))
	end
end
if holder then
	positions.leave(q, claim(holder))
end

local reply = {}
for i = 1, count do
	local answer = i == holder and positions.acquired
		or waits(i) and positions.enqueue(q, claim(i))
		or positions.refused(q)
	reply[2 * i - 1], reply[2 * i] = answer[1], answer[2]
end
positions.close(q, ARGV[3], ARGV[4], ARGV[5])
return reply

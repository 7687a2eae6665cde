-- Gives permits back, all of them or none, and serves those of this client who wait.
-- KEYS, ARGV[1..4]  see pool.lua, permits.lua
-- ARGV[5]           how many permits
-- ARGV[6..]         the permits; behind them, the client and its requests: see
--                   pool.serve, with a width of 3, and permits.entries
-- Reply: 1, how many subscribers were told, and what the reply of permit_acquire.lua
-- has; 0 if one of them is not taken, or has expired.

local before = pool.before()
if before then
	return before
end
local key, taken, now = KEYS[1], KEYS[5], pool.now()
local n = tonumber(ARGV[5])
local at = 6 + n
local ids = {}
for i = 6, at - 1 do
	if not permits.held(taken, ARGV[i], now) then
		return {0}
	end
	ids[#ids + 1] = ARGV[i]
end
pool.begin_return()
redis.call('ZREM', taken, '') -- a user who may not must not do the rest
local served = pool.serve((pool.free() or 0) + n, at, 3)
local entries = permits.entries(at, served.n, now)
local reply = {1, 0, served.n, 0, served.placed}
if served.n > 0 then
	permits.check(key, taken)
end
pool.note(reply)
local rest = pool.change(n - served.taken)
permits.drop(taken, ids)
if served.n > 0 then
	permits.give(key, taken, entries)
end
-- What Redisson tells of a list that is given back is its length.
if rest > 0 and n > 1 and served.n == 0 then
	rest = n
end
reply[2] = pool.tell(rest)
if served.n < tonumber(ARGV[at + 3]) then
	reply[4] = permits.again(served, taken, now)
end
return reply

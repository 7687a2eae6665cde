-- Releases permits, all or none, and serves waiting requests of this client.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- ARGV[7]           number of permits
-- ARGV[8..]         the permits, then the batch: see pool.serve, with a width of 3, and
--                   permits.entries
-- Reply: 1, the number of receivers of the message, and the reply of permit_acquire.lua;
-- 0 if one of the permits is not acquired or has expired.

local cached = pool.cached()
if cached then
	return cached
end
local key, taken, now = KEYS[1], KEYS[6], pool.now()
local free = pool.free() or 0 -- first: a key of another type is an error
local n = tonumber(ARGV[7])
local at = 8 + n
local ids = {}
for i = 8, at - 1 do
	if not permits.held(taken, ARGV[i], now) then
		return pool.cache({0})
	end
	ids[#ids + 1] = ARGV[i]
end
pool.begin_release()
redis.call('ZREM', taken, '') -- fails here, before any change, if the user lacks the right
local most = permits.most(free, taken)
local served = pool.serve(free + n, at, 3, most)
local entries = permits.entries(at, served.n, now)
local reply = {1, 0, served.n, 0, served.queued, most}
if served.n > 0 then
	permits.check(key, taken)
end
pool.cache(reply)
local payload = pool.change(n - served.taken)
permits.remove(taken, ids)
if served.n > 0 then
	permits.grant(key, taken, entries)
end
-- Redisson publishes the length of a released list.
if payload > 0 and n > 1 and served.n == 0 then
	payload = n
end
reply[2] = pool.publish(payload)
if served.n < tonumber(ARGV[at + 3]) then
	reply[4] = permits.retry_in(served, taken, now)
end
return reply

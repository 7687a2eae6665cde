-- Releases permits, and serves waiting requests of this client.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- ARGV[7]           number of permits
-- ARGV[8]           0 to release all or none, 1 to release those that are acquired
-- ARGV[9..]         the permits, then the batch: see pool.serve, with a width of 3, and
--                   permits.entries
-- Reply: 1, or 2 if one of the permits is not acquired or has expired; the number of receivers
-- of the message; and the reply of permit_acquire.lua. Or 0 if no permit was released.

local cached = pool.cached()
if cached then
	return cached
end
local key, taken, now = KEYS[1], KEYS[6], pool.now()
local free = pool.free() -- first: a key of another type is an error
local n = tonumber(ARGV[7])
local at = 9 + n
local ids = {}
for i = 9, at - 1 do
	if permits.held(taken, ARGV[i], now) then
		ids[#ids + 1] = ARGV[i]
	end
end
if #ids == 0 or #ids < n and ARGV[8] == '0' then
	return pool.cache({0})
end
pool.begin_release()
redis.call('ZREM', taken, '') -- fails here, before any change, if the user lacks the right
if not free and ARGV[at + 3] ~= '0' then
	free = permits.create(ARGV[at + 3])
end
free = free or 0
local most = permits.most(free, taken)
local served = pool.serve(free + #ids, at, 3, most)
local entries = permits.entries(at, served.n, now)
local reply = {#ids == n and 1 or 2, 0, served.n, 0, served.queued, most}
if served.n > 0 then
	permits.check(key, taken)
end
pool.cache(reply)
local payload = pool.change(#ids - served.taken)
permits.remove(taken, ids)
if served.n > 0 then
	permits.grant(key, taken, entries)
end
-- Redisson publishes the length of a released list.
if payload > 0 and #ids > 1 and served.n == 0 then
	payload = #ids
end
reply[2] = pool.publish(payload)
if served.n < tonumber(ARGV[at + 4]) then
	reply[4] = permits.retry_in(served, taken, now)
end
return reply

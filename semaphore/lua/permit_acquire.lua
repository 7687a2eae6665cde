-- Acquires leased permits for a batch of requests, in order, as far as the free
-- permits go.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- ARGV[7..]         the batch: see pool.serve, with a width of 3, and permits.entries
-- Reply: number of requests served; ms after which a retry may succeed, -1 if unknown;
-- 1 if the client is in the wait queue for the next request, -1 if there is no semaphore,
-- else 0; the most permits that a request can get.

local cached = pool.cached()
if cached then
	return cached
end
local key, taken, now = KEYS[1], KEYS[6], pool.now()
local before, created = pool.free(), false
if not before and ARGV[10] ~= '0' then
	before, created = permits.create(ARGV[10]), true
end
local wanted = #ARGV - 11 - 3 * ARGV[11] -- the number of ids
local free = before and permits.sweep(key, taken, before, now, wanted)
local most = permits.most(free, taken)
local served = pool.serve(free, 7, 3, most)
local entries = permits.entries(7, served.n, now)
local reply = {served.n, served.retry_in, served.queued, most}
if served.n > 0 then
	permits.check(key, taken)
end
pool.cache(reply)
if served.n > 0 then
	pool.change(-served.taken)
	permits.grant(key, taken, entries)
end
if free and (created or served.left or free > before) then
	pool.publish(free - served.taken) -- wakes the waiters behind this client, and elsewhere
end
-- Without a semaphore no permit comes back.
if free and served.n < tonumber(ARGV[11]) then
	reply[2] = permits.retry_in(served, taken, now)
end
return reply

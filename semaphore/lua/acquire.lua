-- Acquires permits for a batch of requests, in order, as far as the free permits go.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7..]         the batch: see pool.serve, with a width of 2
-- Reply: number of requests served; ms after which a retry may succeed, -1 if unknown;
-- 1 if the client is in the wait queue for the next request, -1 if there is no semaphore,
-- else 0.

local cached = pool.cached()
if cached then
	return cached
end
local free, created = pool.free(), false
if not free and ARGV[10] ~= '0' then
	free, created = pool.create(ARGV[10]), true
end
local served = pool.serve(free, 7, 2, pool.max)
local reply = {served.n, served.retry_in, served.queued}
pool.cache(reply)
if served.n > 0 then
	free = pool.change(-served.taken)
end
if created or served.n > 0 and served.left then
	pool.publish(free) -- wakes the waiters behind this client, and elsewhere
end
return reply

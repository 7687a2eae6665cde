-- Acquires permits for a batch of requests, in order, as far as the free permits go.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7..]         the batch: see pool.serve, with a width of 2
-- Reply: number of requests served; ms after which a retry may succeed, -1 if unknown;
-- 1 if the client is in the wait queue for the next request, else 0.

local cached = pool.cached()
if cached then
	return cached
end
local free = pool.free()
local served = pool.serve(free, 7, 2, pool.max)
local reply = {served.n, served.retry_in, served.queued}
pool.cache(reply)
if served.n > 0 then
	local rest = pool.change(-served.taken)
	if served.left then
		pool.publish(rest) -- wakes the waiters behind this client
	end
end
return reply

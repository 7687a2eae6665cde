-- Removes a client from the wait queue, or moves it to the place of its next request: its first one
-- no longer waits.
-- KEYS, ARGV[1..6]  see pool.lua; idempotent, so it uses no cached reply
-- ARGV[7]           the client
-- ARGV[8]           ms that its next request has waited; absent if that is not to be in the queue
-- ARGV[9]           ms after which its heartbeat is overdue
-- Reply: 1 if the client was in the queue, else 0.

local was
if ARGV[8] then
	was = pool.move(ARGV[7], ARGV[8], ARGV[9])
else
	was = pool.dequeue(ARGV[7])
end
if not was then
	return {0}
end
pool.publish(pool.free() or 0) -- wakes the waiters behind this client
return {1}

-- Removes a client from the wait queue: its request no longer waits.
-- KEYS, ARGV[1..6]  see pool.lua; idempotent, so it uses no cached reply
-- ARGV[7]           the client
-- Reply: 1 if the client was in the queue, else 0.

if not pool.dequeue(ARGV[7]) then
	return {0}
end
pool.publish(pool.free() or 0) -- wakes the waiters behind this client
return {1}

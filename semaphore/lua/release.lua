-- Releases permits and serves waiting requests of this client.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7]           number of permits
-- ARGV[8]           1 to release only if the semaphore exists
-- ARGV[9..]         the batch: see pool.serve, with a width of 2
-- Reply: 1, the number of receivers of the message, and the reply of acquire.lua; 0 if
-- the semaphore does not exist; -1 if there would be too many permits.

local cached = pool.cached()
if cached then
	return cached
end
local free = pool.free()
if not free and ARGV[8] == '1' then
	return pool.cache({0})
end
-- The permits of a semaphore that is gone are among those of its successor.
local size = tonumber(ARGV[12])
local n = not free and size > 0 and size or tonumber(ARGV[7])
local after = (free or 0) + n
if after > pool.max then
	return pool.cache({-1})
end
pool.begin_release()
if not free then
	pool.created()
end
local served = pool.serve(after, 9, 2, pool.max)
local reply = {1, 0, served.n, served.retry_in, served.queued}
pool.cache(reply)
reply[2] = pool.publish(pool.change(n - served.taken))
return reply

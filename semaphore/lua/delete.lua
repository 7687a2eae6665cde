-- Deletes a semaphore with all of its permits, and the wait queue. Cached replies remain: they
-- keep late requests from running.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- Reply: 1 if there was a semaphore or an acquired permit, else 0.

local cached = pool.cached()
if cached then
	return cached
end
local exists = pool.free() -- a key of another type is an error
local acquired = pool.acquired()
redis.call('DEL', KEYS[3], KEYS[4]) -- fails here, before the rest, if the user lacks the right
if not exists and acquired == 0 then
	return pool.cache({0})
end
pool.created() -- no late undo gives permits to a successor
pool.cache({1})
redis.call('DEL', KEYS[1])
if acquired > 0 then
	redis.call('DEL', KEYS[6])
end
return {1}

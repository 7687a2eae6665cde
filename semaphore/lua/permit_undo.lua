-- Undoes an acquisition whose outcome is unknown. It has the sequence number of the
-- acquisition, which therefore has no effect if it arrives later.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- ARGV[7..]         the permits of the acquisition
-- Reply: number of permits released.

local cached = pool.last()
if cached and (cached[1] or -1) < 0 then
	return {0} -- a duplicate of this request
end
-- A semaphore deleted meanwhile stays deleted.
local exists = pool.free()
pool.begin_release()
redis.call('ZREM', KEYS[6], '') -- fails here, before any change, if the user lacks the right
pool.cache({-1})
-- The ids identify the permits even if the cached reply is lost.
local ids = {}
for i = 7, #ARGV do
	ids[#ids + 1] = ARGV[i]
end
local removed = permits.remove(KEYS[6], ids)
if removed > 0 and exists then
	pool.publish(pool.change(removed))
end
return {removed}

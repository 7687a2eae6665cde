-- Sets the number of permits: of a permit semaphore the total, free and acquired, of the
-- other kind the free ones.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- ARGV[7]           number of permits
-- Reply: 1 if that is a change, else 0.

local cached = pool.cached()
if cached then
	return cached
end
local wanted = tonumber(ARGV[7])
local free = pool.free()
local change = wanted - (free or 0) - (free and pool.acquired() or pool.outlived())
if free and change == 0 then
	return pool.cache({0})
end
if not free then
	pool.created()
end
pool.cache({1})
-- The payload is Redisson's. Without a free permit no message is needed.
if pool.change(change) > 0 then
	pool.publish(wanted)
end
return {1}

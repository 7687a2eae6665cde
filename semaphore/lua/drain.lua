-- Acquires all free permits. A negative number is reset to 0, as in Java's drainPermits.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7]           size with which a missing semaphore is created, 0 if it is not
-- Reply: the number of free permits before.

local cached = pool.cached()
if cached then
	return cached
end
local free = pool.free()
if not free and ARGV[7] ~= '0' then
	free = pool.create(ARGV[7])
end
free = free or 0
if free == 0 then
	return pool.cache({0})
end
pool.cache({free})
pool.change(-free) -- keeps the time to live
return {free}

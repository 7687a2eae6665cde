-- Changes the number of permits.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7]           difference, may be negative
-- ARGV[8]           payload of the message: total, the free permits afterwards, or
--                   delta, the difference
-- ARGV[9]           size with which a missing semaphore is created, 0 if it is not
-- Reply: 1; -1 if the result is out of range.

local cached = pool.cached()
if cached then
	return cached
end
local delta = tonumber(ARGV[7])
local free = pool.free()
if not free and ARGV[9] ~= '0' then
	delta = delta + ARGV[9] - pool.acquired()
end
local total = (free or 0) + delta
if total > pool.max or total < -pool.max then
	return pool.cache({-1})
end
if not free then
	pool.outlived()
	pool.created()
end
pool.cache({1})
pool.change(delta) -- keeps the time to live
-- A message is useful only if a waiter can be served.
if total > 0 then
	pool.publish(ARGV[8] == 'delta' and delta or total)
end
return {1}

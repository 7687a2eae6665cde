-- Changes the number of permits.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5]           difference, may be negative
-- ARGV[6]           payload of the message: total, the free permits afterwards, or
--                   delta, the difference
-- Reply: 1; -1 if the result is out of range.

local cached = pool.cached()
if cached then
	return cached
end
local delta = tonumber(ARGV[5])
local total = (pool.free() or 0) + delta
if total > pool.max or total < -pool.max then
	return {-1}
end
pool.cache({1})
pool.change(delta) -- keeps the time to live
-- A message is useful only if a waiter can be served.
if total > 0 then
	pool.publish(ARGV[6] == 'delta' and delta or total)
end
return {1}

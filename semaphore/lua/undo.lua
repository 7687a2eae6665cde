-- Undoes an acquisition whose outcome is unknown. It has the sequence number of the
-- acquisition, which therefore has no effect if it arrives later.
-- KEYS, ARGV[1..6]  see pool.lua
-- ARGV[7..]         the permits of each request of the acquisition
-- Reply: number of permits released.

local cached = pool.last()
if cached and (cached[1] or -1) < 0 then
	return {0} -- a duplicate of this request
end
local taken = 0
for i = 1, cached and math.min(cached[1], #ARGV - 6) or 0 do
	taken = taken + ARGV[6 + i]
end
-- A semaphore deleted meanwhile stays deleted, and its successor has no permits of it.
if not pool.free() or pool.recreated() then
	taken = 0
end
pool.begin_release()
pool.cache({-1})
if taken > 0 then
	pool.publish(pool.change(taken))
end
return {taken}

-- Undoes an acquisition whose outcome is unknown. It has the sequence number of the
-- acquisition, which therefore has no effect if it arrives later.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5..]         the permits of each request of the acquisition
-- Reply: number of permits released.

local cached = pool.cached()
if cached and (cached[1] or -1) < 0 then
	return {0} -- a duplicate of this request
end
local taken = 0
for i = 1, cached and cached[1] or 0 do
	taken = taken + ARGV[4 + i]
end
-- A semaphore deleted meanwhile stays deleted.
if not pool.free() then
	taken = 0
end
pool.begin_release()
pool.cache({-1})
if taken > 0 then
	pool.publish(pool.change(taken))
end
return {taken}

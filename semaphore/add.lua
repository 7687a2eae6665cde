-- Changes how many permits there are.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5]           by how many, which may be negative
-- ARGV[6]           what is told: total, the permits that are free then, or delta, the
--                   change
-- Reply: 1; -1 if there would be too many permits, or too few to count.

local before = pool.before()
if before then
	return before
end
local delta = tonumber(ARGV[5])
local total = (pool.free() or 0) + delta
if total > pool.most or total < -pool.most then
	return {-1}
end
pool.note({1})
pool.change(delta) -- which keeps the time to live
-- As many as can be served, if any can.
if total > 0 then
	pool.tell(ARGV[6] == 'delta' and delta or total)
end
return {1}

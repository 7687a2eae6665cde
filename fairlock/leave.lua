-- Gives up the place of an owner that does not wait any more. It can be repeated.
-- KEYS[1..4]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     owner
-- Reply: 1 if it had one, else 0.

local q = places.open(1, ARGV[1])
places.purge(q)
local had = places.leave(q, ARGV[6])
places.close(q, ARGV[3], ARGV[4], ARGV[5])
return had and 1 or 0

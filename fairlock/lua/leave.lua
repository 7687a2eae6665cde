-- Removes a claim that no longer waits from the queue. It can be repeated.
-- KEYS[1..4]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     claim
-- Reply: 1 if it was in the queue, else 0.

local q = positions.open(1, ARGV[1], ARGV[2])
positions.purge(q)
local removed = positions.leave(q, ARGV[6])
positions.close(q, ARGV[3], ARGV[4], ARGV[5])
return removed and 1 or 0

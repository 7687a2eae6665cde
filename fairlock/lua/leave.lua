-- Removes a claim that no longer waits from the queue. It can be repeated.
-- KEYS[1..5]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     claim
-- Reply: the number of receivers of a message to the next waiter.

local q = positions.open(1, ARGV[1], ARGV[2])
positions.leave(q, ARGV[6])
positions.refresh(q, {})
return positions.close(q, ARGV[3], ARGV[4], ARGV[5])

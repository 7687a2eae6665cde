-- Opens the lock, whatever claim or Java thread holds it, for the first waiter.
-- KEYS[1..5]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- Reply: 1 if it was held, else 0.

-- HLEN, not EXISTS: a key of another type is not a lock to be deleted.
local held = redis.call('HLEN', KEYS[1]) > 0
local q = positions.open(1, ARGV[1], ARGV[2])
positions.free(q)
positions.refresh(q, {})
positions.close(q, ARGV[3], ARGV[4], ARGV[5])
return held and 1 or 0

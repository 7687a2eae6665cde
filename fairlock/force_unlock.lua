-- Opens the lock whoever holds it, for whoever is first.
-- KEYS[1..4]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- Reply: 1 if it was held, else 0.

-- HLEN, not EXISTS: a key of another type is not a lock to be deleted.
local held = redis.call('HLEN', KEYS[1]) > 0
local q = places.open(1, ARGV[1])
redis.call('DEL', KEYS[1])
places.purge(q)
places.freed(q)
places.close(q, ARGV[3], ARGV[4], ARGV[5])
return held and 1 or 0

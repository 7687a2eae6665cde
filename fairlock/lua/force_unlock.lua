-- Opens the lock, whatever claim or Java thread holds it, for the first waiter.
-- KEYS[1..5]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- Reply: 1 if it was held, else 0.

local fields = redis.call('HLEN', KEYS[1])
local held = fields > 0
if held and kinds.of(KEYS[1], fields) ~= 'lock' then
	return kinds.foreign()
end
local q = positions.open(1, ARGV[1], ARGV[2])
positions.free(q)
positions.refresh(q, {})
positions.close(q, ARGV[3], ARGV[4], ARGV[5])
return held and 1 or 0

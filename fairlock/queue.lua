-- Tells who waits. It changes nothing.
-- KEYS[1..4]  as acquire.lua
-- ARGV[1]     as acquire.lua
-- Reply: for each waiter that is alive, the first first, its owner and when it loses
-- its place, in ms of the server's clock.

local q = places.open(1, ARGV[1])
local reply = {}
for _, owner in ipairs(redis.call('LRANGE', q.list, 0, -1)) do
	local dies = redis.call('ZSCORE', q.alive, owner) or redis.call('ZSCORE', q.deadlines, owner)
	dies = tonumber(dies) or q.now + q.wait -- it gets that when it is the first
	if dies > q.now then
		reply[#reply + 1] = owner
		reply[#reply + 1] = dies
	end
end
return reply

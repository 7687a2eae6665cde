-- Lists the first waiters. It changes nothing.
-- KEYS[1..5]  as acquire.lua
-- ARGV[1]     as acquire.lua
-- ARGV[2]     at how many positions it looks
-- Reply: for each live waiter, the first first, its claim or Java thread, and when it
-- loses its position, in ms of the server's clock.

local q = positions.open(1, ARGV[1])
local reply = {}
for _, waiter in ipairs(redis.call('LRANGE', q.list, 0, ARGV[2] - 1)) do
	local dies = positions.dies(q, waiter) or q.now + q.wait -- its deadline once it is at the head
	if dies > q.now then
		reply[#reply + 1] = waiter
		reply[#reply + 1] = dies
	end
end
return reply

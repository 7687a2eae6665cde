-- Gives several locks back. It can be repeated.
-- KEYS[i]     lock hash
-- ARGV[1]     command that publishes
-- ARGV[2]     payload
-- ARGV[2i+1]  claim
-- ARGV[2i+2]  channel
-- Reply: for each what release.lua says; -1 for a key of another type. Or 2 if it is 2 for all.

local replies, free = {}, {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type must not keep the rest.
	local held = redis.pcall('HEXISTS', key, ARGV[2 * i + 1])
	if held == 1 then
		replies[i], free[#free + 1] = 2, key
	else
		replies[i] = held == 0 and 0 or -1
	end
end
if #free > 0 then
	redis.call('DEL', unpack(free))
end
local same = #free == #KEYS
for i = 1, #KEYS do
	if replies[i] == 2 then
		-- pcall: without the right to publish the release stands, and waiters poll.
		local receivers = redis.pcall(ARGV[1], ARGV[2 * i + 2], ARGV[2])
		if type(receivers) == 'number' and receivers > 0 then
			replies[i], same = 2 + receivers, false
		end
	end
end
return same and 2 or replies

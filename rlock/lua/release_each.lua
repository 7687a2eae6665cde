-- Gives several locks back. It can be repeated.
-- KEYS[i]     lock hash
-- ARGV[1]     command that publishes
-- ARGV[2]     payload
-- ARGV[2i+1]  claim
-- ARGV[2i+2]  channel
-- Reply: for each what release.lua says; -1 for a key of another type.

local replies = {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type must not keep the rest.
	local held = redis.pcall('HEXISTS', key, ARGV[2 * i + 1])
	if held == 0 then
		replies[i] = 0
	elseif held ~= 1 then
		replies[i] = -1
	else
		redis.call('DEL', key)
		-- pcall: without the right to publish the release stands, and waiters poll.
		local receivers = redis.pcall(ARGV[1], ARGV[2 * i + 2], ARGV[2])
		replies[i] = 2 + (type(receivers) == 'number' and receivers or 0)
	end
end
return replies

-- Gives several locks back, each for an owner made for one acquisition. It can be
-- repeated.
-- KEYS[i]     lock hash
-- ARGV[1]     command that publishes
-- ARGV[2]     payload
-- ARGV[2i+1]  owner
-- ARGV[2i+2]  channel
-- Reply: for each what release.lua says, and -1 also for a key of another type.

local replies = {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type must not keep the rest.
	local count = redis.pcall('HGET', key, ARGV[2 * i + 1])
	if not count then
		replies[i] = 0
	elseif count ~= '1' then
		replies[i] = -1
	else
		redis.call('DEL', key)
		-- pcall: who may not publish has released all the same, and waiters poll.
		local told = redis.pcall(ARGV[1], ARGV[2 * i + 2], ARGV[2])
		replies[i] = 2 + (type(told) == 'number' and told or 0)
	end
end
return replies

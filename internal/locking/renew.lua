-- Renews a batch of locks.
-- KEYS[i]    lock hash
-- ARGV[1]    lease in ms
-- ARGV[i+1]  its owner
-- Reply: for each key 1 if its owner holds it, else 0.

local held = {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type is a lost lock, and must not
	-- take the rest of the batch with it.
	local mine = redis.pcall('HEXISTS', key, ARGV[i + 1])
	if mine == 1 then
		-- Another hold of the same owner may have asked for longer.
		if redis.call('PTTL', key) < tonumber(ARGV[1]) then
			redis.call('PEXPIRE', key, ARGV[1])
		end
		held[i] = 1
	else
		held[i] = 0
	end
end
return held

-- Renews a batch of locks.
-- KEYS[i]    lock hash
-- ARGV[1]    lease in ms
-- ARGV[i+1]  claim
-- Reply: for each lock 1 if the claim stands, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type is a lost lock, and must not
	-- take the rest of the batch with it.
	held[i] = redis.pcall('HEXISTS', key, ARGV[i + 1]) == 1 and 1 or 0
	-- The claim may have been given more.
	if held[i] == 1 and redis.call('PTTL', key) < lease then
		redis.call('PEXPIRE', key, ARGV[1])
	end
end
return held

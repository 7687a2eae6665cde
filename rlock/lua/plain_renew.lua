-- Renews a batch of plain locks.
-- KEYS[i]      lock string
-- ARGV[1]      lease in ms
-- ARGV[i+1]    claim
-- Reply: for each lock 1 if the claim stands, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type is a lost lock, and must not
	-- take the rest of the batch with it.
	held[i] = redis.pcall('GET', key) == ARGV[i + 1] and 1 or 0
	-- The hold may have been extended for longer.
	if held[i] == 1 and redis.call('PTTL', key) < lease then
		redis.call('PEXPIRE', key, ARGV[1])
	end
end
return held

-- Renews a batch of plain locks.
-- KEYS[i]      lock string
-- ARGV[1]      lease in ms
-- ARGV[2i]     value of the i-th lock
-- ARGV[2i+1]   0: it has no ticket
-- Reply: for each lock 1 if it has the value, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i, key in ipairs(KEYS) do
	-- pcall: a key that has become another type is a lost lock, and must not
	-- take the rest of the batch with it.
	held[i] = redis.pcall('GET', key) == ARGV[2 * i] and 1 or 0
	-- The hold may have been extended for longer.
	if held[i] == 1 and redis.call('PTTL', key) < lease then
		redis.call('PEXPIRE', key, ARGV[1])
	end
end
return held

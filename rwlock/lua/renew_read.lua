-- renew_read
-- Renews a batch of read claims.
-- KEYS[i]      lock hash
-- ARGV[1]      lease in ms
-- ARGV[2i]     claim
-- ARGV[2i+1]   prefix of the keys of the lock's read holds
-- Reply: for each lock 1 if the claim stands, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i, key in ipairs(KEYS) do
	local claim, prefix = ARGV[2 * i], ARGV[2 * i + 1]
	-- pcall: a key whose type has changed is a lost lock, and must not fail the rest of
	-- the batch. A write that the server refuses fails the batch: that loses no lock.
	local fields = redis.pcall('HMGET', key, 'mode', claim)
	held[i] = fields[1] and fields[2] and 1 or 0
	if held[i] == 1 then
		-- An Extend may have given the claim more time.
		holds.prolong(key, prefix, claim, lease)
	end
end
return held

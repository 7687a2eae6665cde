-- renew_read
-- Renews a batch of read claims.
-- KEYS[2i-1]  lock hash
-- KEYS[2i]    key of the read hold
-- ARGV[1]     lease in ms
-- ARGV[i+1]   claim
-- Reply: for each lock 1 if the claim stands, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i = 1, #KEYS / 2 do
	local key, claim = KEYS[2 * i - 1], ARGV[i + 1]
	-- pcall: a key whose type has changed is a lost lock, and must not fail the rest of
	-- the batch. A write that the server refuses fails the batch: that loses no lock.
	local fields = redis.pcall('HMGET', key, 'mode', claim)
	held[i] = fields[1] and fields[2] and 1 or 0
	if held[i] == 1 then
		-- An Extend may have given the claim more time.
		holds.prolong(key, KEYS[2 * i], lease)
	end
end
return held

-- extend
-- Makes a claim last at least a lease from now.
-- KEYS[1]  lock hash
-- KEYS[2]  key of the read hold, for a reader only
-- ARGV[1]  field of the claim
-- ARGV[2]  lease in ms
-- Reply: 1; 0 if the claim does not stand.

local mode, held = unpack(redis.call('HMGET', KEYS[1], 'mode', ARGV[1]))
if not mode or not held then
	return 0
end
if KEYS[2] then
	holds.prolong(KEYS[1], KEYS[2], tonumber(ARGV[2]))
else
	holds.raise(KEYS[1], tonumber(ARGV[2]))
end
return 1

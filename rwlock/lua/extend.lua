-- extend
-- Makes a claim last at least a lease from now.
-- KEYS[1]  lock hash
-- ARGV[1]  field of the claim
-- ARGV[2]  lease in ms
-- ARGV[3]  prefix of the keys of read holds, for a reader only
-- Reply: 1; 0 if the claim does not stand.

local mode, held = unpack(redis.call('HMGET', KEYS[1], 'mode', ARGV[1]))
if not mode or not held then
	return 0
end
if ARGV[3] then
	holds.prolong(KEYS[1], ARGV[3], ARGV[1], tonumber(ARGV[2]))
else
	holds.raise(KEYS[1], tonumber(ARGV[2]))
end
return 1

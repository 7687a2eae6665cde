-- Makes a hold last at least a lease from now.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket, for an owner that the caller named only
-- ARGV[1]  field of the owner, as a reader or as a writer
-- ARGV[2]  lease in ms
-- ARGV[3]  what the keys of read holds begin with, for a reader only
-- Reply: 1; 0 if the owner does not hold the lock.

local mode, count = unpack(redis.call('HMGET', KEYS[1], 'mode', ARGV[1]))
if not mode or not count or KEYS[2] and redis.call('GET', KEYS[2]) ~= 'held' then
	return 0
end
local lease = tonumber(ARGV[2])
if ARGV[3] then
	holds.prolong(KEYS[1], ARGV[3], ARGV[1], count, lease)
else
	holds.raise(KEYS[1], lease)
end
if KEYS[2] then
	holds.raise(KEYS[2], lease)
end
return 1

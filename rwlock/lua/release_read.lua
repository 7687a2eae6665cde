-- release_read
-- Releases a read claim. It can be repeated.
-- KEYS[1]  lock hash
-- KEYS[2]  waiting writers, which are not used
-- ARGV[1]  prefix of the keys of read holds
-- ARGV[2]  claim
-- ARGV[3]  command that publishes
-- ARGV[4]  channel
-- ARGV[5]  payload
-- Reply: 2 plus the number of receivers if the lock is free; 1 if there are other holders;
-- 0 if the claim does not stand.

local mode, held = unpack(redis.call('HMGET', KEYS[1], 'mode', ARGV[2]))
if not mode or not held then
	return 0
end
local free, err = holds.end_read(KEYS[1], ARGV[1], ARGV[2], mode)
if not free then
	return err or 1
end
return 2 + holds.publish(ARGV[3], ARGV[4], ARGV[5])

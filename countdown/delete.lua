-- Removes the count.
-- KEYS[1]  count
-- KEYS[2]  identity of the round
-- ARGV[1]  command that publishes
-- ARGV[2]  channel
-- ARGV[3]  payload
-- Reply: 1 if there was a count, else 0.

local count, err = latch.count(KEYS[1])
if err then
	return err
end
-- Redisson may have left a count of zero, which keeps it from setting another.
if not count and redis.call('EXISTS', KEYS[1]) == 0 then
	return 0
end
latch.open(KEYS[1], KEYS[2])
latch.tell(ARGV[1], ARGV[2], ARGV[3])
return 1

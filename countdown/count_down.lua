-- Takes something off the count, and opens the latch if nothing is left.
-- KEYS[1]  count
-- KEYS[2]  identity of the round
-- ARGV[1]  how much to take off, 1 or more
-- ARGV[2]  command that publishes
-- ARGV[3]  channel
-- ARGV[4]  payload
-- Reply: what is left; 0 also if there was nothing.

local count, err = latch.count(KEYS[1])
if err then
	return err
end
if count and count > tonumber(ARGV[1]) then
	return redis.call('DECRBY', KEYS[1], ARGV[1])
end
-- Redisson may have left a count of zero, for which nobody waits.
if count or redis.call('EXISTS', KEYS[1]) == 1 then
	latch.open(KEYS[1], KEYS[2])
	latch.tell(ARGV[2], ARGV[3], ARGV[4])
end
return 0

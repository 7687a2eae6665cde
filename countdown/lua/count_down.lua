-- Decrements the count and ends the round if nothing is left.
--KEYS[1]  count
--KEYS[2]  round id
--ARGV[1]  decrement, 1 or more
--ARGV[2]  publish command
--ARGV[3]  channel
--ARGV[4]  payload
--Reply: the remaining count; 0 also if there was no count.

local count, err = latch.count(KEYS[1])
if err then
	return err
end
if count and count > tonumber(ARGV[1]) then
	return redis.call('DECRBY', KEYS[1], ARGV[1])
end
-- Redisson may leave a count of zero, for which nothing waits.
if count or redis.call('EXISTS', KEYS[1]) == 1 then
	latch.finish(KEYS[1], KEYS[2])
	latch.publish(ARGV[2], ARGV[3], ARGV[4])
end
return 0

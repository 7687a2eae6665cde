-- Removes the count.
--KEYS[1]  count
--KEYS[2]  round id
--ARGV[1]  publish command
--ARGV[2]  channel
--ARGV[3]  payload
--Reply: 1 if there was a count, else 0.

local count, err = latch.count(KEYS[1])
if err then
	return err
end
-- Redisson may leave a count of zero, which prevents it from setting another.
if not count and redis.call('EXISTS', KEYS[1]) == 0 then
	return 0
end
latch.finish(KEYS[1], KEYS[2])
latch.publish(ARGV[1], ARGV[2], ARGV[3])
return 1

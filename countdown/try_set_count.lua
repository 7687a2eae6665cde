-- Sets the count if there is none.
-- KEYS[1]  count
-- KEYS[2]  identity of the round
-- ARGV[1]  count, 1 or more
-- ARGV[2]  identity of this round
-- ARGV[3]  for how long that is kept, in ms
-- ARGV[4]  command that publishes
-- ARGV[5]  channel
-- ARGV[6]  payload
-- Reply: 1 if it was set, else 0.

local count, err = latch.count(KEYS[1])
if err then
	return err
end
if count then
	-- This request was delivered before, and has set it.
	return redis.pcall('GET', KEYS[2]) == ARGV[2] and 1 or 0
end
redis.call('SET', KEYS[1], ARGV[1])
redis.pcall('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
latch.tell(ARGV[4], ARGV[5], ARGV[6])
return 1

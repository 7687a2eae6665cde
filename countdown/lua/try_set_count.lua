-- Sets the count if there is none.
--KEYS[1]  count
--KEYS[2]  round id
--ARGV[1]  count, 1 or more
--ARGV[2]  id of the new round
--ARGV[3]  time to live of the id, in ms
--ARGV[4]  publish command
--ARGV[5]  channel
--ARGV[6]  payload
--Reply: 1 if the count was set, else 0.

local count, err = latch.count(KEYS[1])
if err then
	return err
end
if count then
	-- An earlier delivery of this request may have set the count.
	return redis.pcall('GET', KEYS[2]) == ARGV[2] and 1 or 0
end
redis.call('SET', KEYS[1], ARGV[1])
redis.pcall('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
latch.publish(ARGV[4], ARGV[5], ARGV[6])
return 1

-- Sets the count if there is none.
--ARGV[5]  count, 1 or more
--ARGV[6]  id of the new round
--ARGV[7]  time to live of the id, in ms
--ARGV[8]  time to live of the count, in ms, '' for none
--Reply: 1 if the count was set, else 0.

if latch.count > 0 then
	return 0
end
if ARGV[8] == '' then
	redis.call('SET', KEYS[1], ARGV[5])
else
	redis.call('SET', KEYS[1], ARGV[5], 'PX', ARGV[8])
end
redis.pcall('SET', KEYS[2], ARGV[6], 'PX', ARGV[7])
latch.publish()
return latch.reply(1)

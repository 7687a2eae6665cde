-- Decrements the count and ends the round if nothing is left.
--ARGV[5]  decrement, 1 or more
--Reply: the remaining count; 0 also if there was no count.

if latch.count > tonumber(ARGV[5]) then
	return latch.reply(redis.call('DECRBY', KEYS[1], ARGV[5]))
end
-- Redisson may leave a count of zero, for which nothing waits.
if not latch.stored then
	return 0
end
latch.finish()
latch.publish()
return latch.reply(0)

-- Removes the count.
--Reply: 1 if there was a count, else 0.

-- Redisson may leave a count of zero, which prevents it from setting another.
if not latch.stored then
	return 0
end
latch.finish()
latch.publish()
return latch.reply(1)

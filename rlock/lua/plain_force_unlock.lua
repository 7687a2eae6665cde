-- Opens a plain lock, regardless of its holder.
-- KEYS[1]  lock string
-- ARGV[1]  command that publishes
-- ARGV[2]  channel
-- ARGV[3]  payload
-- Reply: 1 if it was held, else 0.

-- GET, not EXISTS: a key of another type is not a lock to be deleted.
if not redis.call('GET', KEYS[1]) then
	return 0
end
redis.call('DEL', KEYS[1])
redis.pcall(ARGV[1], ARGV[2], ARGV[3])
return 1

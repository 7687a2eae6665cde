-- Opens the lock, regardless of its holder.
-- KEYS[1]  lock hash
-- ARGV[1]  command that publishes, or ''
-- ARGV[2]  channel
-- ARGV[3]  payload
-- Reply: 1 if it was held, else 0.

-- HLEN, not EXISTS: a key of another type is not a lock to be deleted.
if redis.call('HLEN', KEYS[1]) == 0 then
	return 0
end
redis.call('DEL', KEYS[1])
if ARGV[1] ~= '' then
	redis.pcall(ARGV[1], ARGV[2], ARGV[3])
end
return 1

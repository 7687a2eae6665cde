-- Opens a plain lock, regardless of its holder.
-- KEYS[1]  lock string
-- ARGV[1]  command that publishes
-- ARGV[2]  channel
-- ARGV[3]  payload
-- Reply: 1 if it was held, else 0.

-- GET, not EXISTS: a key of another type is not a lock to be deleted.
local value = redis.call('GET', KEYS[1])
if not value then
	return 0
end
-- Semaphores, latches and counters are such numbers. The lock of another library may be a number, but it expires.
if value:find('^%-?%d+$') and redis.call('PTTL', KEYS[1]) == -1 then
	return redis.error_reply('WRONGTYPE The number at this key is not a lock')
end
redis.call('DEL', KEYS[1])
redis.pcall(ARGV[1], ARGV[2], ARGV[3])
return 1

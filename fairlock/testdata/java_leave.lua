-- What Redisson does when a waiter gives up.
-- KEYS     lock, list, deadlines
-- ARGV[1]  owner
-- ARGV[2]  its wait in ms
local behind = false
for _, owner in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
	if behind then
		redis.call('ZINCRBY', KEYS[3], -ARGV[2], owner)
	end
	behind = behind or owner == ARGV[1]
end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('LREM', KEYS[2], 0, ARGV[1])

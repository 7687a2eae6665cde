-- Puts a hold under another owner, each of them made for one acquisition. It can be
-- repeated.
-- KEYS[1]  lock hash
-- ARGV[1]  owner who has it
-- ARGV[2]  owner who gets it
-- Reply: 1 if the second owner has it now, else 0.

if redis.call('HGET', KEYS[1], ARGV[1]) == '1' then
	redis.call('HSET', KEYS[1], ARGV[2], 1)
	redis.call('HDEL', KEYS[1], ARGV[1])
	return 1
end
return redis.call('HEXISTS', KEYS[1], ARGV[2])

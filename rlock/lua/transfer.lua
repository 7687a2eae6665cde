-- Passes a lock from one claim to another, with a lease from now. A repetition changes nothing: it may come late.
-- KEYS[1]  lock hash
-- ARGV[1]  claim that has the lock
-- ARGV[2]  claim that gets it
-- ARGV[3]  lease in ms
-- ARGV[4]  command that publishes, or '' for a lock that publishes nothing
-- ARGV[5]  channel, which is no key: ACL rules have channels of their own
-- ARGV[6]  payload
-- Reply: 1; 2 if the claim that gets it has it already; 0 if neither claim stands.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
	return 2 * redis.call('HEXISTS', KEYS[1], ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- first: a script may begin with it when the server is out of memory
redis.call('HSET', KEYS[1], ARGV[2], 1)
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then
	-- PEXPIRE has deleted the key: to Redis 6.2 a short lease may be over at once.
	redis.call('DEL', KEYS[1])
end
if ARGV[4] ~= '' then
	redis.pcall(ARGV[4], ARGV[5], ARGV[6]) -- waiters learn the new expiry
end
return 1

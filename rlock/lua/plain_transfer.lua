-- Passes a plain lock from one claim to another, with a lease from now. A repetition changes nothing: it may come late.
-- KEYS[1]  lock string
-- ARGV[1]  claim that has the lock
-- ARGV[2]  claim that gets it
-- ARGV[3]  lease in ms
-- ARGV[4]  command that publishes
-- ARGV[5]  channel, which is no key: ACL rules have channels of their own
-- ARGV[6]  payload
-- Reply: 1; 2 if the claim that gets it has it already; 0 if neither claim stands.

local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
	redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- first: a script may begin with it when the server is out of memory
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
	redis.pcall(ARGV[4], ARGV[5], ARGV[6]) -- waiters learn the new expiry
	return 1
end
return holder == ARGV[2] and 2 or 0

-- Gives a plain lock back. It can be repeated.
-- KEYS[1]  lock string
-- ARGV[1]  claim
-- ARGV[2]  command that publishes
-- ARGV[3]  channel, which is no key: ACL rules have channels of their own
-- ARGV[4]  payload
-- Reply: free, 2 plus the number of receivers; 0 not held.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
	return 0
end
redis.call('DEL', KEYS[1])
-- pcall: without the right to publish the release stands, and waiters poll.
local receivers = redis.pcall(ARGV[2], ARGV[3], ARGV[4])
if type(receivers) ~= 'number' then
	receivers = 0
end
return 2 + receivers

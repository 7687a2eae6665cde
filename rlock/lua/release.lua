-- release
-- Gives the lock back. It can be repeated.
-- KEYS[1]  lock hash
-- ARGV[1]  claim
-- ARGV[2]  command that publishes, or '' for a lock that publishes nothing
-- ARGV[3]  channel, which is no key: ACL rules have channels of their own
-- ARGV[4]  payload
-- Reply: free, 2 plus the number of receivers; 0 not held.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
	return 0
end
redis.call('DEL', KEYS[1])
local receivers = 0
if ARGV[2] ~= '' then
	-- pcall: without the right to publish the release stands, and waiters poll.
	receivers = redis.pcall(ARGV[2], ARGV[3], ARGV[4])
	if type(receivers) ~= 'number' then
		receivers = 0
	end
end
return 2 + receivers

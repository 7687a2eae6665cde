-- Gives the lock back for an owner made for one acquisition. It can be repeated.
-- KEYS[1]  lock hash
-- ARGV[1]  owner
-- ARGV[2]  command that publishes, or '' for a lock that tells nobody
-- ARGV[3]  channel, which is no key: ACL rules treat it apart
-- ARGV[4]  payload
-- Reply: free, 2 plus the number of subscribers told; 0 not held; -1 held more
-- than once, and nothing was done.

local count = redis.call('HGET', KEYS[1], ARGV[1])
if not count then
	return 0
end
if count ~= '1' then
	return -1
end
redis.call('DEL', KEYS[1])
local told = 0
if ARGV[2] ~= '' then
	-- pcall: who may not publish has released all the same, and waiters poll.
	told = redis.pcall(ARGV[2], ARGV[3], ARGV[4])
	if type(told) ~= 'number' then
		told = 0
	end
end
return 2 + told

-- Gives a plain lock back. It can be repeated.
-- KEYS[1]  lock string
-- ARGV[1]  value
-- ARGV[2]  command that publishes
-- ARGV[3]  channel, which is no key: ACL rules treat it apart
-- ARGV[4]  payload
-- Reply: free, 2 plus the number of subscribers told; 0 not held.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
	return 0
end
redis.call('DEL', KEYS[1])
-- pcall: who may not publish has released all the same, and waiters poll.
local told = redis.pcall(ARGV[2], ARGV[3], ARGV[4])
if type(told) ~= 'number' then
	told = 0
end
return 2 + told

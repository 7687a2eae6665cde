-- Reads the term of the leader.
--KEYS[1]  lock
--KEYS[2]  last term
--Reply: owner, token and value; nil if the last term is over.

local term = redis.call('HMGET', KEYS[2], 'owner', 'token', 'value')
if term[1] and redis.call('HEXISTS', KEYS[1], term[1]) == 1 then
	return term
end
return false

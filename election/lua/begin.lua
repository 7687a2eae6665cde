-- Begins the term of the candidate that has acquired the lock. It can be repeated.
--KEYS[1]  lock
--KEYS[2]  last term
--ARGV[1]  owner of the lock
--ARGV[2]  value
--ARGV[3]  publish command
--ARGV[4]  channel
--Reply: the token of the term, 0 if the owner does not have the lock.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
	return 0
end
local reply = redis.pcall('HGET', KEYS[2], 'token')
if redis.pcall('HGET', KEYS[2], 'owner') == ARGV[1] then
	local begun, bad = tokens.last(reply, 0)
	return begun or bad
end
local _, bad = tokens.last(reply, 1)
if bad then
	return bad
end
local token = redis.call('HINCRBY', KEYS[2], 'token', 1)
redis.call('HSET', KEYS[2], 'owner', ARGV[1], 'value', ARGV[2])
-- pcall: where publishing is forbidden, observers poll.
redis.pcall(ARGV[3], ARGV[4], token)
return token

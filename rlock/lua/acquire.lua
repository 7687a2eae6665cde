-- Takes the lock.
-- KEYS[1]  lock hash: a field per owner, which here is a claim, with how often it holds: once
-- KEYS[2]  fencing counter, for a fenced lock only
-- ARGV[1]  lease in ms
-- ARGV[2]  claim
-- Reply: acquired, the fencing token or 0; taken, a list of PTTL, which is -1 if the key has no expiry.

local fields = redis.call('HLEN', KEYS[1])
if fields == 0 then
	-- What can fail comes first, and leaves nothing.
	local token = 0
	if KEYS[2] then
		local _, bad = tokens.last(redis.pcall('GET', KEYS[2]), 1)
		if bad then
			return bad
		end
		token = redis.call('INCR', KEYS[2])
	end
	redis.call('HSET', KEYS[1], ARGV[2], '1') -- a number would have to be converted
	local expires = redis.pcall('PEXPIRE', KEYS[1], ARGV[1])
	if expires ~= 1 then -- without that right the user must not take it for ever
		redis.call('DEL', KEYS[1])
		return expires
	end
	return token
end
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
	local left = redis.call('PTTL', KEYS[1])
	if left == 0 then -- a replica of Redis 6.2 keeps what has expired, and refuses this, which has no effect
		redis.call('HDEL', KEYS[1], '')
	end
	if not kinds.of(KEYS[1], fields) then
		return kinds.foreign()
	end
	return {left == -2 and 0 or left} -- -2 if it has expired since
end
-- An attempt was delivered twice: this one, or an earlier one of the same wait. The caller
-- counts the lease from this one.
local token, bad = 0
if KEYS[2] then
	token, bad = tokens.last(redis.pcall('GET', KEYS[2]), 0)
end
if bad then
	return bad
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return token

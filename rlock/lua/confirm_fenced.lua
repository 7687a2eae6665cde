-- Makes a claim to a fenced lock last at least a lease from now, and draws tokens for holds
-- that will have it next.
-- KEYS[1]  lock hash
-- KEYS[2]  fencing counter
-- ARGV[1]  claim
-- ARGV[2]  lease in ms
-- ARGV[3]  number of tokens
-- Reply: {1, number of tokens drawn, the last of them}; {0, 0, 0} if the claim does not stand.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
	return {0, 0, 0}
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local n = tonumber(ARGV[3])
-- pcall: a counter that allows no token must not hide that the claim stands.
local last = tokens.last(redis.pcall('GET', KEYS[2]), n)
if not last then
	return {1, 0, 0}
end
for i = 1, n do
	local token = redis.pcall('INCR', KEYS[2])
	if type(token) ~= 'number' then
		return {1, i - 1, last}
	end
	last = token
end
return {1, n, last}

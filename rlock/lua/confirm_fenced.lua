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
local last = 0
for i = 1, tonumber(ARGV[3]) do
	-- pcall: a counter of another type must not hide that the claim stands.
	local token = redis.pcall('INCR', KEYS[2])
	if type(token) ~= 'number' then
		return {1, i - 1, last}
	end
	last = token
end
return {1, tonumber(ARGV[3]), last}

-- Raises the fencing counter of a lock, held or not. It can be repeated.
-- KEYS[1]  fencing counter
-- ARGV[1]  floor: the least that the counter becomes
-- Reply: the counter, which is the last token.

local last, bad = tokens.last(redis.pcall('GET', KEYS[1]), 1)
if bad then
	return bad
end
local missing = tonumber(ARGV[1]) - last
if missing <= 0 then
	return last
end
return redis.call('INCRBY', KEYS[1], string.format('%d', missing)) -- some servers write large numbers with an exponent

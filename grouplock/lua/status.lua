-- Reads who has values of a group.
-- KEYS[1]    hash of the group
-- ARGV[1]    an owner, or ''
-- ARGV[1+i]  value
-- Reply: the ms after which all leases of the values will be over, 0 if the values are free; how often the owner has
-- locked them all.

local left, count = 0, math.huge
for i = 2, #ARGV do
	local owner = redis.call('HGET', KEYS[1], ARGV[i])
	local rest = owner and group.left(KEYS[1], ARGV[i], owner) or 0
	left = math.max(left, rest)
	count = math.min(count, rest > 0 and owner == ARGV[1] and group.count(KEYS[1], ARGV[i], owner) or 0)
end
return {left, count}

-- Locks values of a group, all or none.
-- KEYS[1]    hash of the group
-- ARGV[1]    lease in ms
-- ARGV[2]    claim
-- ARGV[2+i]  value
-- Reply: 0 if they are acquired; otherwise the ms after which all leases of the values will be over.

local lease, claim = tonumber(ARGV[1]), ARGV[2]
local fresh = redis.call('EXISTS', KEYS[1]) == 0
if not fresh and not group.is(KEYS[1]) then
	return kinds.foreign()
end
local values, dead, taken = {unpack(ARGV, 3)}, {}, 0
for _, value in ipairs(values) do
	local owner = redis.call('HGET', KEYS[1], value)
	if owner and owner ~= claim then
		dead[value] = owner
		taken = math.max(taken, group.left(KEYS[1], value, owner))
	end
end
if taken > 0 then
	return taken
end
-- An attempt may be delivered twice: this one, or an earlier one of the same wait. The caller counts the lease from
-- this one.
group.give(KEYS[1], claim, values, lease)
group.drop(KEYS[1], dead)
if fresh then
	local expires = redis.pcall('PEXPIRE', KEYS[1], lease)
	if expires ~= 1 then -- without that right the user must not leave a key for ever
		redis.call('DEL', KEYS[1])
		return expires
	end
else
	group.raise(KEYS[1], lease)
end
return 0

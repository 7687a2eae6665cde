-- Makes a claim last at least a lease from now.
-- KEYS[1]    hash of the group
-- ARGV[1]    claim
-- ARGV[2]    lease in ms
-- ARGV[2+i]  value
-- Reply: 1; 0 if the claim does not have all values.

local values = {unpack(ARGV, 3)}
if not group.stands(KEYS[1], ARGV[1], values) then
	return 0
end
group.keep(KEYS[1], ARGV[1], values, tonumber(ARGV[2]))
return 1

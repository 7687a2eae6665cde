-- Passes values of a group from one claim to another, with a lease from now. A repetition changes nothing: it may come
-- late.
-- KEYS[1]    hash of the group
-- ARGV[1]    claim that has the values
-- ARGV[2]    claim that gets them
-- ARGV[3]    lease in ms
-- ARGV[4]    command that publishes
-- ARGV[5]    channel, which is no key: ACL rules have channels of their own
-- ARGV[5+i]  value
-- Reply: 1; 2 if the claim that gets them has them already; 0 if neither claim has all of them.

local values = {unpack(ARGV, 6)}
if not group.stands(KEYS[1], ARGV[1], values) then
	return group.stands(KEYS[1], ARGV[2], values) and 2 or 0
end
group.keep(KEYS[1], ARGV[2], values, tonumber(ARGV[3])) -- before the old claim leaves: the hash stays
group.leave(KEYS[1], ARGV[1], values)
group.publish(ARGV[4], ARGV[5]) -- waiters learn the new expiry
return 1

-- Frees values of a group, regardless of their owners.
-- KEYS[1]    hash of the group
-- ARGV[1]    command that publishes
-- ARGV[2]    channel
-- ARGV[2+i]  value
-- Reply: 1 if one of them was locked, else 0.

if redis.call('EXISTS', KEYS[1]) == 0 then
	return 0
end
if not group.is(KEYS[1]) then
	return kinds.foreign()
end
local owners, held = {}, false
for i = 3, #ARGV do
	local owner = redis.call('HGET', KEYS[1], ARGV[i])
	if owner then
		held = group.left(KEYS[1], ARGV[i], owner) > 0 or held
		owners[ARGV[i]] = owner
	end
end
group.drop(KEYS[1], owners)
if held then
	group.publish(ARGV[1], ARGV[2])
end
return held and 1 or 0

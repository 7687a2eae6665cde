-- Opens the lock, whichever claims hold it, if it is in the given mode.
-- KEYS[1]  lock hash
-- KEYS[2]  waiting writers, which are not used
-- ARGV[1]  prefix of the keys of read holds
-- ARGV[2]  read or write
-- ARGV[3]  command that publishes
-- ARGV[4]  channel
-- ARGV[5]  payload
-- Reply: 1 if it was in that mode, else 0.

local count = redis.call('HLEN', KEYS[1])
if count == 0 then
	return 0
end
local kind = kinds.of(KEYS[1], count)
if not kind then
	return kinds.foreign()
end
if kind ~= ARGV[2] then
	return 0
end
local owners, counts = holds.all(KEYS[1])
if not owners then
	return counts
end
for _, owner in ipairs(owners) do
	if not kinds.is_owner(owner) then
		return kinds.foreign()
	end
end
redis.call('DEL', KEYS[1])
for i, owner in ipairs(owners) do
	for n = 1, counts[i] do
		redis.call('DEL', holds.key(ARGV[1], owner, n))
	end
end
holds.publish(ARGV[3], ARGV[4], ARGV[5])
return 1

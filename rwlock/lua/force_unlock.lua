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
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
	if fields[i] ~= 'mode' and not kinds.is_owner(fields[i]) then
		return kinds.foreign()
	end
end
redis.call('DEL', KEYS[1])
for i = 1, #fields, 2 do
	for n = 1, tonumber(fields[i + 1]) or 0 do -- mode has no number
		redis.call('DEL', holds.key(ARGV[1], fields[i], n))
	end
end
holds.publish(ARGV[3], ARGV[4], ARGV[5])
return 1

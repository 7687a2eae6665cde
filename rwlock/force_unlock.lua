-- Opens the lock whoever holds it, if it is in the given mode.
-- KEYS[1]  lock hash
-- ARGV[1]  what the keys of read holds begin with
-- ARGV[2]  read or write
-- ARGV[3]  command that publishes
-- ARGV[4]  channel
-- ARGV[5]  payload
-- Reply: 1 if it was held so, else 0.

-- A key of another type is an error, and not a lock to be deleted.
local fields = redis.call('HGETALL', KEYS[1])
if redis.call('HGET', KEYS[1], 'mode') ~= ARGV[2] then
	return 0
end
redis.call('DEL', KEYS[1])
for i = 1, #fields, 2 do
	for n = 1, tonumber(fields[i + 1]) or 0 do -- no number for mode
		redis.call('DEL', holds.key(ARGV[1], fields[i], n))
	end
end
holds.tell(ARGV[3], ARGV[4], ARGV[5])
return 1

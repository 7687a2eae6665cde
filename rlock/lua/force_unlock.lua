-- Opens the lock, regardless of its holder.
-- KEYS[1]  lock hash
-- ARGV[1]  command that publishes, or ''
-- ARGV[2]  channel
-- ARGV[3]  payload
-- Reply: 1 if it was held, else 0.

local fields = redis.call('HLEN', KEYS[1])
if fields == 0 then
	return 0
end
if kinds.of(KEYS[1], fields) ~= 'lock' then
	return kinds.foreign()
end
redis.call('DEL', KEYS[1])
if ARGV[1] ~= '' then
	redis.pcall(ARGV[1], ARGV[2], ARGV[3])
end
return 1

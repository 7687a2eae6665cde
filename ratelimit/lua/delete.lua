-- Deletes a limiter, with the permits of this client.
-- KEYS     see limiter.lua
-- ARGV[1]  publish command
-- ARGV[2]  channel
-- ARGV[3]  1 if this request may have run before
-- Reply: 1 if there was one, or may have been, else 0.

redis.call('HGET', KEYS[1], 'type') -- raises the error for a key of another type
local deleted = redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
redis.call('DEL', KEYS[6])
if deleted > 0 then
	redis.pcall(ARGV[1], ARGV[2], '1')
end
return {(deleted > 0 or ARGV[3] == '1') and 1 or 0}

-- Ends the turn of a client that no longer waits.
-- KEYS[1]  turn
-- ARGV[1]  publish command
-- ARGV[2]  channel
-- ARGV[3]  client
-- Reply: 1 if it had the turn, else 0.

local turn = redis.call('GET', KEYS[1])
if not turn or string.match(turn, '^%d+ (.*)$') ~= ARGV[3] then
	return 0
end
redis.call('DEL', KEYS[1])
redis.pcall(ARGV[1], ARGV[2], '1')
return 1

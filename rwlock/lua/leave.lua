-- Removes a writer that no longer waits, and so lets readers in again. It can be repeated.
-- KEYS[1]  waiting writers
-- ARGV[1]  claim
-- ARGV[2]  command that publishes
-- ARGV[3]  channel
-- ARGV[4]  payload
-- Reply: 0.

if redis.call('SREM', KEYS[1], ARGV[1]) == 1 and redis.call('EXISTS', KEYS[1]) == 0 then
	-- pcall: without this right, readers try again when the writer would count as dead.
	redis.pcall(ARGV[2], ARGV[3], ARGV[4])
end
return 0

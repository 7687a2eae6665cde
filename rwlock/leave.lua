-- Lets readers in again for a writer that does not wait any more. It can be repeated.
-- KEYS[1]  writers that wait
-- ARGV[1]  owner
-- ARGV[2]  command that publishes
-- ARGV[3]  channel
-- ARGV[4]  payload
-- Reply: 0.

if redis.call('SREM', KEYS[1], ARGV[1]) == 1 and redis.call('EXISTS', KEYS[1]) == 0 then
	-- pcall: for who may not publish, readers try when the writer would have been
	-- taken for dead.
	redis.pcall(ARGV[2], ARGV[3], ARGV[4])
end
return 0

-- release_write
-- Releases a write claim. A writer that also reads goes on as a reader. It can be repeated.
-- KEYS[1]  lock hash
-- KEYS[2]  waiting writers
-- ARGV     as in release_read.lua
-- Reply: as in release_read.lua. The lock also counts as free if the writer goes on as a
-- reader, because other readers can enter.

local field = ARGV[2] .. ':write'
local mode, held = unpack(redis.call('HMGET', KEYS[1], 'mode', field))
if mode == 'write' and held then
	local err = holds.end_write(KEYS[1], ARGV[1], field)
	if err then
		return err
	end
	return 2 + holds.publish(ARGV[3], ARGV[4], ARGV[5])
end
-- The claim may still be waiting, and block readers.
if redis.call('SREM', KEYS[2], ARGV[2]) == 1 and redis.call('EXISTS', KEYS[2]) == 0 then
	holds.publish(ARGV[3], ARGV[4], ARGV[5])
end
return 0

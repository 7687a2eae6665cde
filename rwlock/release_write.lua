-- Gives one write hold back, as release_read.lua a read hold. A writer that reads
-- goes on as a reader.
-- KEYS[1]  lock hash
-- KEYS[2]  writers that wait
-- KEYS[3]  ticket, for an owner that the caller named only
-- ARGV     as release_read.lua
-- Reply: as release_read.lua; free also if the owner goes on as a reader, because
-- others can enter.

local field = ARGV[2] .. ':write'
local mode, count = unpack(redis.call('HMGET', KEYS[1], 'mode', field))
local reply = holds.nothing_to_end(mode == 'write' and count, KEYS[3], ARGV[7])
if reply then
	-- The acquisition that is undone may have come to no more than keeping readers out.
	if redis.call('SREM', KEYS[2], ARGV[2]) == 1 and redis.call('EXISTS', KEYS[2]) == 0 then
		holds.tell(ARGV[3], ARGV[4], ARGV[5])
	end
	return reply
end
local free = holds.end_write(KEYS[1], ARGV[1], field, count)
holds.note(KEYS[3], ARGV[7], free, ARGV[6])
if not free then
	return 1
end
return 2 + holds.tell(ARGV[3], ARGV[4], ARGV[5])

-- Gives one read hold back. For an owner made for one acquisition it can be repeated;
-- for one that the caller named it counts once per ticket.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket, for an owner that the caller named only
-- ARGV[1]  what the keys of read holds begin with
-- ARGV[2]  owner
-- ARGV[3]  command that publishes
-- ARGV[4]  channel
-- ARGV[5]  payload
-- ARGV[6]  for how long the ticket is kept, in ms
-- ARGV[7]  hold: the hold of this ticket, if it is still there; undo: the same,
--          after an acquisition of which nothing is known; any: the owner's, for a
--          ticket made for this release
-- Reply: free, 2 plus the number of subscribers told; 1 still held, by this owner or
-- others; 0 not held; -1 held more than once by an owner without a ticket, and
-- nothing was done.

local mode, count = unpack(redis.call('HMGET', KEYS[1], 'mode', ARGV[2]))
local reply = holds.nothing_to_end(mode and count, KEYS[2], ARGV[7])
if reply then
	return reply
end
-- A hold of a named owner has as much time left as its ticket.
local left = KEYS[2] and ARGV[7] ~= 'any' and redis.call('PTTL', KEYS[2])
local free = holds.end_read(KEYS[1], ARGV[1], ARGV[2], count, left)
holds.note(KEYS[2], ARGV[7], free, ARGV[6])
if not free then
	return 1
end
return 2 + holds.tell(ARGV[3], ARGV[4], ARGV[5])

-- Moves acquired permits to other ids, all or none, with a lease from now.
-- KEYS, ARGV[1..6]  see pool.lua, permits.lua
-- ARGV[7]           1 to undo the request with this sequence number, which had the ids the other
--                   way round and has no effect if it arrives later; else 0
-- ARGV[8]           lease in ms, or 'forever'
-- ARGV[9..]         the permits, then as many ids that get them
-- Reply: 1; 0 if one of the permits is not acquired or has expired; -1 for an undo.

local undo = ARGV[7] == '1'
local cached
if undo then
	cached = pool.last()
	cached = cached and (cached[1] or -1) < 0 and {-1} -- a duplicate of this request
else
	cached = pool.cached()
end
if cached then
	return cached
end
local key, taken, now = KEYS[1], KEYS[6], pool.now()
local n = (#ARGV - 8) / 2
local stand, moved = true, true
local ids, entries = {}, {}
for i = 9, 8 + n do
	stand = stand and permits.held(taken, ARGV[i], now)
	-- The ids identify the permits even if the cached reply is lost.
	moved = moved and permits.held(taken, ARGV[i + n], now)
	ids[#ids + 1] = ARGV[i]
	entries[#entries + 1] = permits.deadline(ARGV[8], now)
	entries[#entries + 1] = ARGV[i + n]
end
pool.begin_release()
permits.check(key, taken)
local reply = pool.cache({undo and -1 or (stand or moved) and 1 or 0})
if stand then
	permits.grant(key, taken, entries) -- first: an empty set would lose its time to live
	permits.remove(taken, ids)
	pool.publish(n) -- waiters in Java learn the new expiry
end
return reply

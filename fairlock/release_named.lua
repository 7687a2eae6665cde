-- Gives one hold back for an owner that the caller named, once per ticket. The
-- server counts an owner's holds and does not tell them apart; the tickets do. It
-- gives up no place: other waiters may have the same owner.
-- KEYS[1..4]  as acquire.lua
-- KEYS[5]     ticket
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     owner
-- ARGV[7]     for how long the ticket is kept, in ms
-- ARGV[8]     hold: the hold of this ticket, if it is still there; undo: the same,
--             after an acquisition of which nothing is known; any: the owner's, for
--             a ticket made for this release
-- Reply: free, 2 plus the number of subscribers told; 1 still held; 0 not held.

local ticket = redis.call('GET', KEYS[5])
if ticket == '0' or ticket == '1' then
	-- The result of an earlier delivery, as Redisson's unlock latch keeps it:
	-- 1 for free, 0 for still held.
	return 1 + tonumber(ticket)
end
local count = redis.call('HGET', KEYS[1], ARGV[6])
if ARGV[8] ~= 'any' and ticket ~= 'held' then
	return 0
end
if not count then
	redis.call('DEL', KEYS[5])
	return 0
end
local q = places.open(1, ARGV[1])

-- What became of this request, for its repetitions. An acquisition that is
-- undone has none to come.
local function note(result)
	if ARGV[8] == 'undo' then
		redis.call('DEL', KEYS[5])
	else
		redis.call('SET', KEYS[5], result, 'PX', ARGV[7])
	end
end

if count ~= '1' then
	redis.call('HINCRBY', KEYS[1], ARGV[6], -1)
	note('0')
	return 1
end
-- DEL comes first: a server that is out of memory allows it, and what follows.
redis.call('DEL', KEYS[1])
note('1')
places.purge(q)
places.freed(q)
return 2 + places.close(q, ARGV[3], ARGV[4], ARGV[5])

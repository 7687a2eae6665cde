-- Gives one hold back for an owner that the caller named, once per ticket. The
-- server counts an owner's holds and does not tell them apart; the tickets do.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket
-- ARGV[1]  owner
-- ARGV[2]  command that publishes, or ''
-- ARGV[3]  channel
-- ARGV[4]  payload
-- ARGV[5]  for how long the ticket is kept, in ms
-- ARGV[6]  hold: the hold of this ticket, if it is still there; undo: the same,
--          after an acquisition of which nothing is known; any: the owner's, for a
--          ticket made for this release
-- Reply: free, 2 plus the number of subscribers told; 1 still held; 0 not held.

local ticket = redis.call('GET', KEYS[2])
if ticket == '0' or ticket == '1' then
	-- The result of an earlier delivery, as Redisson's unlock latch keeps it:
	-- 1 for free, 0 for still held.
	return 1 + tonumber(ticket)
end
local count = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[6] ~= 'any' and ticket ~= 'held' then
	return 0
end
if not count then
	redis.call('DEL', KEYS[2])
	return 0
end

-- What became of this request, for its repetitions. An acquisition that is
-- undone has none to come.
local function note(result)
	if ARGV[6] == 'undo' then
		redis.call('DEL', KEYS[2])
	else
		redis.call('SET', KEYS[2], result, 'PX', ARGV[5])
	end
end

if count ~= '1' then
	redis.call('HINCRBY', KEYS[1], ARGV[1], -1)
	note('0')
	return 1
end
-- DEL comes first: a server that is out of memory allows it, and what follows.
redis.call('DEL', KEYS[1])
local told = 0
if ARGV[2] ~= '' then
	-- pcall: who may not publish has released all the same, and waiters poll.
	told = redis.pcall(ARGV[2], ARGV[3], ARGV[4])
	if type(told) ~= 'number' then
		told = 0
	end
end
note('1')
return 2 + told

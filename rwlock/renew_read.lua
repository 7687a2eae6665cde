-- Renews a batch of read holds.
-- KEYS[i]      lock hash; behind them all, the tickets there are
-- ARGV[1]      lease in ms
-- ARGV[3i-1]   owner of the i-th lock
-- ARGV[3i]     what the keys of its read holds begin with
-- ARGV[3i+1]   which of KEYS is its ticket, 0 if it has none
-- Reply: for each lock 1 if its owner holds it, else 0.

local lease = tonumber(ARGV[1])

local function renew(lock, owner, prefix, ticket)
	-- pcall: a key that has become another type is a lost lock, and must not take the
	-- rest of the batch with it. What a server refuses to write is not lost.
	local fields = redis.pcall('HMGET', lock, 'mode', owner)
	local mode, count = fields[1], fields[2]
	-- Without its ticket it is another hold of this owner that is there.
	if not mode or not count or ticket and redis.pcall('GET', ticket) ~= 'held' then
		return 0
	end
	-- No key is cut short: another hold may have asked for longer.
	holds.prolong(lock, prefix, owner, count, lease)
	if ticket then
		holds.raise(ticket, lease)
	end
	return 1
end

local held = {}
for i = 1, (#ARGV - 1) / 3 do
	held[i] = renew(KEYS[i], ARGV[3 * i - 1], ARGV[3 * i], KEYS[tonumber(ARGV[3 * i + 1])])
end
return held

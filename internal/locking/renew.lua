-- Renews a batch of locks.
-- KEYS[i]      lock hash; behind them all, the tickets there are
-- ARGV[1]      lease in ms
-- ARGV[2i]     owner of the i-th lock
-- ARGV[2i+1]   which of KEYS is its ticket, 0 if it has none
-- Reply: for each lock 1 if its owner holds it, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i = 1, (#ARGV - 1) / 2 do
	local key, ticket = KEYS[i], KEYS[tonumber(ARGV[2 * i + 1])]
	-- pcall: a key that has become another type is a lost lock, and must not
	-- take the rest of the batch with it.
	held[i] = redis.pcall('HEXISTS', key, ARGV[2 * i]) == 1 and 1 or 0
	if held[i] == 1 and ticket then
		-- Without its ticket it is another hold of this owner that is there.
		held[i] = redis.pcall('GET', ticket) == 'held' and 1 or 0
		if held[i] == 1 and redis.call('PTTL', ticket) < lease then
			redis.call('PEXPIRE', ticket, ARGV[1])
		end
	end
	-- Another hold of the same owner may have asked for longer.
	if held[i] == 1 and redis.call('PTTL', key) < lease then
		redis.call('PEXPIRE', key, ARGV[1])
	end
end
return held

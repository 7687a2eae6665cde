-- Looks at a latch.
-- KEYS[1]  count
-- KEYS[2]  identity of the round
-- Reply: the count, nil if there is none; its time to live in ms, -1 if it has
-- none; the identity of the round, nil if it is not known.

local count = redis.call('GET', KEYS[1])
local round = redis.pcall('GET', KEYS[2])
return {count, redis.call('PTTL', KEYS[1]), type(round) == 'string' and round}

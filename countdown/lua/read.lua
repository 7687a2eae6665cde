-- Reads the state of a latch.
--KEYS[1]  count
--KEYS[2]  round id
--Reply: the count, nil if there is none; its time to live in ms, -1 if it has none;
--the round id, nil if it is unknown.

local count = redis.call('GET', KEYS[1])
local round = redis.pcall('GET', KEYS[2])
return {count, redis.call('PTTL', KEYS[1]), type(round) == 'string' and round}

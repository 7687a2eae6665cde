-- Counts the free permits. It writes nothing.
-- KEYS  see limiter.lua
-- Reply: their number, which is negative if the rate was lowered, and the rate; -1 alone if there is no limiter.

local failed = limiter.load() or limiter.peek()
if failed then
	return failed
end
return {limiter.free(), limiter.rate()}

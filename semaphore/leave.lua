-- Takes a client out of the line: its request does not wait any more.
-- KEYS, ARGV[1..4]  see pool.lua; there is no ticket, and it can be repeated
-- ARGV[5]           the client
-- Reply: 1 if it was in it, else 0.

if not pool.step_out(ARGV[5]) then
	return {0}
end
pool.tell(pool.free() or 0) -- to those who could not pass
return {1}

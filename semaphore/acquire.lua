-- Takes permits for requests that wait behind one another, as far as they go.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5..]         the client and its requests: see pool.serve, with a width of 2
-- Reply: how many requests were served; after how many ms trying again may help, -1
-- if that is not known; 1 if the next of them stands in line, else 0.

local before = pool.before()
if before then
	return before
end
local free = pool.free()
local served = pool.serve(free, 5, 2)
local reply = {served.n, served.again, served.placed}
if served.n > 0 then
	pool.note(reply)
	local rest = pool.change(-served.taken)
	if served.left then
		pool.tell(rest) -- to those who could not pass
	end
end
return reply

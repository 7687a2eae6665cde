-- Gives permits back, and serves those of this client who wait.
-- KEYS, ARGV[1..4]  see pool.lua
-- ARGV[5]           permits
-- ARGV[6]           1 if there has to be a semaphore already
-- ARGV[7..]         the client and its requests: see pool.serve, with a width of 2
-- Reply: 1, how many subscribers were told, and what the reply of acquire.lua has;
-- 0 if there is no semaphore; -1 if there would be too many permits.

local before = pool.before()
if before then
	return before
end
local free = pool.free()
if not free and ARGV[6] == '1' then
	return {0}
end
local n = tonumber(ARGV[5])
free = (free or 0) + n
if free > pool.most then
	return {-1}
end
pool.begin_return()
local served = pool.serve(free, 7, 2)
local reply = {1, 0, served.n, served.again, served.placed}
pool.note(reply)
reply[2] = pool.tell(pool.change(n - served.taken))
return reply

-- Takes permits that expire for requests that wait behind one another, as far as
-- they go.
-- KEYS, ARGV[1..4]  see pool.lua, permits.lua
-- ARGV[5..]         the client and its requests: see pool.serve, with a width of 3,
--                   and permits.entries
-- Reply: how many requests were served; after how many ms trying again may help, -1
-- if that is not known; 1 if the next of them stands in line, else 0.

local before = pool.before()
if before then
	return before
end
local key, taken, now = KEYS[1], KEYS[5], pool.now()
local had = pool.free()
local wanted = #ARGV - 8 - 3 * ARGV[8] -- as many as there are ids
local free = had and permits.sweep(key, taken, had, now, wanted)
local served = pool.serve(free, 5, 3)
local entries = permits.entries(5, served.n, now)
local reply = {served.n, served.again, served.placed}
if served.n > 0 then
	permits.check(key, taken)
	pool.note(reply)
	pool.change(-served.taken)
	permits.give(key, taken, entries)
end
if free and (served.left or free > had) then
	pool.tell(free - served.taken) -- to those who could not pass, or wait elsewhere
end
-- Where there are no permits at all none come back.
if free and served.n < tonumber(ARGV[8]) then
	reply[2] = permits.again(served, taken, now)
end
return reply

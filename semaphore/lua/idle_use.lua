-- Runs a script that uses a semaphore, whatever its reply, and sets its lifetime: see idle.lua.
-- KEYS  see pool.lua, or KEYS[1] number of free permits, KEYS[2] acquired permits

local reply = operation()
keep(KEYS[1], #KEYS == 2 and KEYS[2] or KEYS[6])
return reply

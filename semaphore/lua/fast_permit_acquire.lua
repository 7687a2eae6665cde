-- Acquires one leased permit: see fast.lua.
-- KEYS[3]  wait queue
-- KEYS[4]  acquired permits: see permits.lua
-- ARGV[4]  lease in ms, or 'forever'
-- ARGV[5]  id of the permit
-- Reply: 1; -1 if permit_acquire.lua must decide.

-- The acquired permits of a semaphore that expires would have to expire with it. Those that have
-- expired are to be free first.
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if call('PTTL', KEYS[1]) ~= -1 or call('EXISTS', KEYS[3]) == 1
	or call('ZCOUNT', KEYS[4], '-inf', string.format('%d', now)) ~= 0
	or type(try('HSET', KEYS[2], ARGV[2], entry)) ~= 'number' then
	return -1
end
local free = try('INCRBY', KEYS[1], '-1')
if type(free) == 'number' then
	local deadline = '922337203685477'
	if ARGV[4] ~= 'forever' then
		deadline = string.format('%d', now + ARGV[4] + 1)
	end
	if free >= 0 and type(try('ZADD', KEYS[4], deadline, ARGV[5])) == 'number' then
		return 1
	end
	call('INCRBY', KEYS[1], '1')
end
call('HSET', KEYS[2], ARGV[2], before)
return -1

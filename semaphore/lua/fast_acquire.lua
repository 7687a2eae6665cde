-- Acquires permits for one request: see fast.lua.
-- KEYS[3]  wait queue
-- ARGV[4]  number of permits
-- Reply: 1; 0 if too few are free; -1 if acquire.lua must decide.

-- The third key counts twice.
if call('EXISTS', KEYS[1], KEYS[3], KEYS[3]) ~= 1
	or type(try('HSET', KEYS[2], ARGV[2], entry)) ~= 'number' then
	return -1
end
local free = try('INCRBY', KEYS[1], '-' .. ARGV[4])
if type(free) ~= 'number' then
	call('HSET', KEYS[2], ARGV[2], before)
	return -1
end
if free < 0 then
	call('INCRBY', KEYS[1], ARGV[4])
	call('HSET', KEYS[2], ARGV[2], entry .. ' 0 -1 0')
	return 0
end
return 1

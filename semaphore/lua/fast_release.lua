-- Releases permits: see fast.lua.
-- ARGV[4]  number of permits
-- ARGV[5]  command that publishes
-- ARGV[6]  channel
-- Reply: the number of receivers of the message; -1 if release.lua must decide.

if call('EXISTS', KEYS[1]) == 0 or type(try('HSET', KEYS[2], ARGV[2], entry)) ~= 'number' then
	return -1
end
local free = try('INCRBY', KEYS[1], ARGV[4])
if type(free) ~= 'number' or free > 2147483647 then
	call('HSET', KEYS[2], ARGV[2], before)
	if type(free) == 'number' then
		call('INCRBY', KEYS[1], '-' .. ARGV[4])
	end
	return -1
end
-- try: without the right to publish the release is still valid, and waiters poll.
local receivers = free > 0 and try(ARGV[5], ARGV[6], free)
return type(receivers) == 'number' and receivers or 0

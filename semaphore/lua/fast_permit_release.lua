-- Releases one permit: see fast.lua.
-- KEYS[3]  acquired permits: see permits.lua
-- ARGV[4]  id of the permit
-- ARGV[5]  command that publishes
-- ARGV[6]  channel
-- Reply: the number of receivers of the message; -1 if permit_release.lua must decide.

local at = call('ZSCORE', KEYS[3], ARGV[4])
if not at or tonumber(at) <= time[1] * 1000 + math.floor(time[2] / 1000) or call('EXISTS', KEYS[1]) == 0
	or type(try('HSET', KEYS[2], ARGV[2], entry)) ~= 'number' then
	return -1
end
local free = try('INCRBY', KEYS[1], '1')
if type(free) == 'number' then
	if type(try('ZREM', KEYS[3], ARGV[4])) == 'number' then
		-- try: without the right to publish the release is still valid, and waiters poll.
		local receivers = free > 0 and try(ARGV[5], ARGV[6], free)
		return type(receivers) == 'number' and receivers or 0
	end
	call('INCRBY', KEYS[1], '-1')
end
call('HSET', KEYS[2], ARGV[2], before)
return -1

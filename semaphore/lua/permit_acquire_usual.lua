-- The usual case of permit_acquire.lua: see usual.lua. It is for one permit of a semaphore that does not
-- expire, or only if it is not used, while no permit has expired.

local now = time[1] * 1000 + math.floor(time[2] / 1000)
local free = usual and ARGV[11] == '1' and ARGV[12] == '1' and tonumber(call('GET', KEYS[1]))
if free and free > 0 and (ARGV.idle or call('PTTL', KEYS[1]) == -1)
	and call('ZCOUNT', KEYS[6], '-inf', string.format('%d', now)) == 0 then
	local most = free + call('ZCARD', KEYS[6])
	local deadline = ARGV[14] == 'forever' and '922337203685477' or string.format('%d', now + ARGV[14] + 1)
	if change('-1', '1 -1 0 ' .. most) then
		if type(try('ZADD', KEYS[6], deadline, ARGV[15])) == 'number' then
			return {1, -1, 0, most}
		end
		undo('1')
	end
end

-- The usual case of permit_release.lua: see usual.lua. It is for one permit that is acquired.

local now = time[1] * 1000 + math.floor(time[2] / 1000)
local free = usual and ARGV[7] == '1' and ARGV[14] == '0' and tonumber(call('GET', KEYS[1]))
if free and tonumber(call('ZSCORE', KEYS[6], ARGV[9]) or 0) > now then
	local most = free + call('ZCARD', KEYS[6])
	most = most > 0 and most or 2147483647
	if change('1', '1 0 0 0 0 ' .. most) then
		if type(try('ZREM', KEYS[6], ARGV[9])) == 'number' then
			return {1, publish(free + 1), 0, 0, 0, most}
		end
		undo('-1')
	end
end

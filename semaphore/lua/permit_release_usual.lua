-- The usual case of permit_release.lua: see usual.lua. It is for one permit that is acquired.

if free and ARGV[7] == '1' and ARGV[14] == '0' and tonumber(call('ZSCORE', KEYS[6], ARGV[9]) or 0) > now then
	local most = free + call('ZCARD', KEYS[6])
	most = most > 0 and most or 2147483647
	if change('1', '1 0 0 0 0 ' .. most) then
		if type(try('ZREM', KEYS[6], ARGV[9])) == 'number' then
			return {1, publish(free + 1), 0, 0, 0, most}
		end
		call('INCRBY', KEYS[1], '-1')
		forget()
	end
end

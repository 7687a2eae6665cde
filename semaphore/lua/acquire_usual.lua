-- The usual case of acquire.lua: see usual.lua.

if usual and ARGV[11] == '1' and (tonumber(call('GET', KEYS[1])) or -1) - ARGV[12] >= 0
	and change('-' .. ARGV[12], '1 -1 0') then
	return {1, -1, 0}
end

-- The usual case of acquire.lua: see usual.lua.

if free and ARGV[11] == '1' and free >= tonumber(ARGV[12]) and change('-' .. ARGV[12], '1 -1 0') then
	return {1, -1, 0}
end

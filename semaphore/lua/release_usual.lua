-- The usual case of release.lua: see usual.lua.

local after = free and free + ARGV[7]
if free and ARGV[13] == '0' and after <= 2147483647 and change(ARGV[7], '1 0 0 -1 0') then
	return {1, publish(after), 0, -1, 0}
end

-- The usual case of release.lua: see usual.lua.

if usual and ARGV[13] == '0' then
	local free = change(ARGV[7], '1 0 0 -1 0')
	if free and free <= 2147483647 then
		return {1, publish(free), 0, -1, 0}
	elseif free then
		undo('-' .. ARGV[7])
	end
end

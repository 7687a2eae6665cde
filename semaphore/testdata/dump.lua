-- Reply: every key there is, with its type, its contents and when it expires, and
-- what was published since the last time. Members of sets are hexadecimal.
local lines = {}
local function hex(c)
	return string.format('%02x', string.byte(c))
end
for _, key in ipairs(server.call('KEYS', '*')) do
	if string.sub(key, 1, 5) ~= 'test:' then
		local exists, at = look(key)
		if exists then
			local kind, what = server.call('TYPE', key).ok, nil
			if kind == 'string' then
				what = {server.call('GET', key)}
			else
				local flat = server.call('ZRANGE', key, 0, -1, 'WITHSCORES')
				what = {}
				for i = 1, #flat, 2 do
					what[#what + 1] = string.gsub(flat[i], '.', hex) .. '=' .. flat[i + 1]
				end
				table.sort(what)
			end
			lines[#lines + 1] = key .. ' ' .. kind .. ' ' .. table.concat(what, ' ') .. ' until ' .. (at or 'ever')
		end
	end
end
table.sort(lines)
for _, line in ipairs(server.call('LRANGE', 'test:published', 0, -1)) do
	lines[#lines + 1] = 'told ' .. line
end
server.call('DEL', 'test:published')
return table.concat(lines, '\n')

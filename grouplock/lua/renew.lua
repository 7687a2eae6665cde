-- Renews a batch of claims.
-- KEYS[i]      hash of a group
-- ARGV[1]      lease in ms
-- ARGV[i+1]    claim and its values, after a space each
-- Reply: for each claim 1 if it has all of its values, else 0.

local lease = tonumber(ARGV[1])
local held = {}
for i, key in ipairs(KEYS) do
	local values = {}
	for word in ARGV[i + 1]:gmatch('%S+') do
		values[#values + 1] = word
	end
	local claim = table.remove(values, 1)
	-- pcall: a key that has become another type is a lost lock, and must not take the rest of the batch with it.
	local ok, stands = pcall(group.stands, key, claim, values)
	held[i] = ok and stands and 1 or 0
	if held[i] == 1 then
		group.keep(key, claim, values, lease)
	end
end
return held

-- Renews a batch of permits with permit_renew.lua, and sets the lifetime of their semaphores: see idle.lua.
-- KEYS[i]    acquired permits of the i-th permit's semaphore
-- KEYS[n+i]  number of free permits of the same semaphore; n is the number of permits

local free = {}
for i = #KEYS / 2, 1, -1 do
	free[i] = table.remove(KEYS)
end
local held, kept = operation(), nil
for i = 1, #KEYS do
	if held[i] == 1 and free[i] ~= kept then
		keep(free[i], KEYS[i])
		kept = free[i]
	end
end
return held

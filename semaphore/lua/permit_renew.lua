-- Renews a batch of permits.
-- KEYS[i]      acquired permits of the i-th permit's semaphore
-- ARGV[1]      lease in ms
-- ARGV[i+1]    the i-th permit
-- Reply: for each permit 1 if it is still acquired, else 0.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline = now + ARGV[1] + 1 -- as permits.deadline
local held, writes = {}, false
for i = 1, #KEYS do
	-- pcall: a key of another type means a lost permit and must not fail the batch.
	local score = redis.pcall('ZSCORE', KEYS[i], ARGV[i + 1])
	local at = type(score) == 'string' and tonumber(score) or 0
	held[i] = at > now and 1 or 0
	if held[i] == 1 and at < deadline then
		if not writes then
			-- A server out of memory rejects only the first write of a script: this one needs
			-- no memory and has no effect.
			redis.pcall('ZREM', KEYS[i], '')
			writes = true
		end
		redis.call('ZADD', KEYS[i], 'XX', deadline, ARGV[i + 1])
	end
end
return held

-- Gives permits back that were not used. The oldest entries lose them: whichever entry they belong to, no window has
-- more permits in use than it has entries.
-- KEYS[1..6]  see limiter.lua
-- KEYS[7]     the cached reply of this request
-- ARGV[1]     publish command
-- ARGV[2]     channel
-- ARGV[3]     number of permits
-- ARGV[4]     time to live of the cached reply, in ms
-- Reply: the number of permits that were given back; -1 if there is no limiter.

local call = redis.call

local cached = call('GET', KEYS[7])
if cached then
	return {tonumber(cached)}
end
local failed = limiter.load() or limiter.read()
if failed then
	return failed
end
limiter.due(limiter.rate(), 0) -- removes the expired entries
local entries, left = limiter.entries(), tonumber(ARGV[3])
while left > 0 do
	local entry, at = unpack(call('ZRANGE', entries, 0, 0, 'WITHSCORES'))
	if not entry then
		break
	end
	local n = limiter.size(entry)
	call('ZREM', entries, entry)
	if n > left then
		call('ZADD', entries, at, limiter.resized(entry, n - left))
	end
	left = left - math.min(n, left)
end
local released = ARGV[3] - left
limiter.give(released)
limiter.store()
-- pcall: a user without permission may release twice if a reply is lost.
redis.pcall('SET', KEYS[7], released, 'PX', ARGV[4])
if released > 0 then
	limiter.publish(ARGV[1], ARGV[2])
end
return {released}

-- Cancels a request whose reply was lost, unless it has had an effect.
--KEYS[3]  its cached reply
--Reply: that of the request, or -1: it will not run, even if it arrives later.

local cached = redis.call('GET', KEYS[3])
if cached then
	return tonumber(cached)
end
redis.call('SET', KEYS[3], -1, 'PX', 3600000) -- no network delays a request for an hour
return -1

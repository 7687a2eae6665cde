-- Removes the entry of a request whose caller has given up.
-- KEYS     see limiter.lua
-- ARGV[1]  publish command
-- ARGV[2]  channel
-- ARGV[3]  entry
-- ARGV[4]  its permits
-- Reply: the number of permits that it had, 0 if it is not there; -1 if there is no limiter.

local failed = limiter.load() or limiter.read()
if failed then
	return failed
end
if redis.call('ZREM', limiter.entries(), ARGV[3]) == 0 then
	return {0}
end
limiter.give(tonumber(ARGV[4]))
limiter.store()
limiter.publish(ARGV[1], ARGV[2])
return {tonumber(ARGV[4])}

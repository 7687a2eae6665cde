-- What Redisson does to change how many permits there are.
-- KEYS[1]  permits
-- ARGV[1]  by how many
-- ARGV[2]  channel
-- ARGV[3]  delta if the permits expire, else total
local total = (redis.call('GET', KEYS[1]) or 0) + ARGV[1]
redis.call('SET', KEYS[1], total)
if ARGV[3] == 'total' then
	redis.call('PUBLISH', ARGV[2], total)
elseif tonumber(ARGV[1]) > 0 then
	redis.call('PUBLISH', ARGV[2], ARGV[1])
end
return {1}

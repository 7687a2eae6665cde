-- Passes the lock from one claim to another, with a lease from now. A repetition changes nothing: it may come late.
-- KEYS[1..5]  as acquire.lua
-- ARGV[1..5]  as acquire.lua
-- ARGV[6]     claim that has the lock
-- ARGV[7]     claim that gets it
-- ARGV[8]     lease in ms
-- Reply: 1; 2 if the claim that gets it has it already; 0 if neither claim stands.

local q = positions.open(1, ARGV[1], ARGV[2])
if redis.call('HEXISTS', KEYS[1], ARGV[6]) == 0 then
	return 2 * redis.call('HEXISTS', KEYS[1], ARGV[7])
end
redis.call('PEXPIRE', KEYS[1], ARGV[8]) -- first: a script may begin with it when the server is out of memory
redis.call('HSET', KEYS[1], ARGV[7], 1)
if redis.call('HDEL', KEYS[1], ARGV[6]) == 0 then
	-- PEXPIRE has deleted the key: to Redis 6.2 a short lease may be over at once.
	redis.call('DEL', KEYS[1])
end
if q.head then
	redis.pcall(ARGV[3], ARGV[4] .. ':' .. q.head, ARGV[5]) -- the head learns the new expiry
end
return 1

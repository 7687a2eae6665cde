-- Gives one hold back for an owner that the caller named, once per ticket.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket
-- ARGV[1]  owner
-- ARGV[2]  command that publishes, or ''
-- ARGV[3]  channel
-- ARGV[4]  payload
-- ARGV[5]  for how long the ticket is kept, in ms
-- ARGV[6]  1 to void an acquisition of which nothing is known
-- Reply: free, 2 plus the number of subscribers told; 1 still held; 0 not held.

local ticket = redis.call('GET', KEYS[2])
if ticket == '0' or ticket == '1' then
	-- The result of an earlier delivery, as Redisson's unlock latch keeps it:
	-- 1 for free, 0 for still held.
	return 1 + tonumber(ticket)
end
if ticket == 'void' then
	return 0
end
if ARGV[6] == '1' and not ticket then
	redis.call('SET', KEYS[2], 'void', 'PX', ARGV[5])
	return 0
end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
	return 0
end
if redis.call('HINCRBY', KEYS[1], ARGV[1], -1) > 0 then
	redis.call('SET', KEYS[2], '0', 'PX', ARGV[5])
	return 1
end
redis.call('DEL', KEYS[1])
local told = 0
if ARGV[2] ~= '' then
	told = redis.call(ARGV[2], ARGV[3], ARGV[4])
end
redis.call('SET', KEYS[2], '1', 'PX', ARGV[5])
return 2 + told

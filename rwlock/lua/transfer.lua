-- transfer
-- Passes the write side, or a read hold, from one claim to another, with a lease from now. A
-- repetition changes nothing: it may come late.
-- KEYS[1]  lock hash
-- KEYS[2]  waiting writers, which are not used
-- ARGV[1]  prefix of the keys of read holds
-- ARGV[2]  claim that has it
-- ARGV[3]  claim that gets it
-- ARGV[4]  lease in ms
-- ARGV[5]  'read' or 'write'
-- ARGV[6]  command that publishes
-- ARGV[7]  channel
-- ARGV[8]  payload
-- Reply: 1; 2 if the claim that gets it has it already; 0 if neither claim stands, or the lease of
-- the read hold is over.

local read, lease = ARGV[5] == 'read', tonumber(ARGV[4])
local suffix = read and '' or ':write'
local from, to = ARGV[2] .. suffix, ARGV[3] .. suffix
local old, new = holds.key(ARGV[1], ARGV[2], 1), holds.key(ARGV[1], ARGV[3], 1)
local mode, has, got = unpack(redis.call('HMGET', KEYS[1], 'mode', from, to))
if not mode or not has and not got or read and redis.call('PTTL', has and old or new) == -2 then
	return 0
end
if not has then
	return 2
end
local longest
if not read or mode ~= 'write' then -- the write claim determines the expiry
	local err
	longest, err = holds.longest(KEYS[1], ARGV[1], from)
	if err then
		return err
	end
end
-- First: a script may begin with it when the server is out of memory.
redis.call('PEXPIRE', read and old or KEYS[1], lease)
if read then
	redis.call('SET', new, 1, 'PX', lease)
end
redis.call('HSET', KEYS[1], to, 1)
redis.call('HDEL', KEYS[1], from)
if read then
	redis.call('DEL', old)
end
if longest then
	redis.call('PEXPIRE', KEYS[1], math.max(lease, longest))
else
	holds.raise(KEYS[1], lease)
end
holds.publish(ARGV[6], ARGV[7], ARGV[8]) -- waiters learn the new expiry
return 1

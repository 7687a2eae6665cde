-- acquire_write
-- Takes the lock for a writer.
-- KEYS[1]  lock hash
-- KEYS[2]  writers that wait for readers: a set that blocks new readers
-- ARGV[1]  lease in ms
-- ARGV[2]  claim
-- ARGV[3]  1 if the claim waits and may block readers
-- ARGV[4]  ms for which it blocks them unless it tries again
-- Reply: {1, 0} if the claim is acquired, else {0, ms}, or {2, ms} if it blocks readers.
-- After that many ms another attempt may succeed; -1 means that the lock has no expiry.

local lease, field = tonumber(ARGV[1]), ARGV[2] .. ':write'
local mode, writes = unpack(redis.call('HMGET', KEYS[1], 'mode', field))
-- A hash without a mode is a lock of another kind.
if mode == 'write' and writes then
	-- This attempt, or an earlier one of the same claim, was delivered twice. The caller
	-- counts the lease from this one.
	holds.raise(KEYS[1], lease)
	return {1, 0}
end
local fields = redis.call('HLEN', KEYS[1])
if fields > 0 then
	if not kinds.of(KEYS[1], fields) then
		return kinds.foreign()
	end
	local free_in = redis.call('PTTL', KEYS[1])
	if mode ~= 'read' or ARGV[3] ~= '1' then
		if free_in == 0 then -- a replica of Redis 6.2 keeps what has expired, and refuses this, which has no effect
			redis.call('HDEL', KEYS[1], '')
		end
		return {0, free_in}
	end
	-- All waiting writers share one set, and each attempt prolongs it. The set ends when
	-- the last writer leaves, or soon after the last one dies.
	redis.call('SADD', KEYS[2], ARGV[2])
	local expires = redis.pcall('PEXPIRE', KEYS[2], ARGV[4])
	if expires ~= 1 then -- a user without this right must not block readers for ever
		redis.call('SREM', KEYS[2], ARGV[2])
		return expires
	end
	return {2, free_in}
end
redis.call('HSET', KEYS[1], 'mode', 'write', field, 1)
local expires = redis.pcall('PEXPIRE', KEYS[1], ARGV[1])
if expires ~= 1 then -- a user without this right must not take the lock for ever
	redis.call('DEL', KEYS[1])
	return expires
end
-- The blocked readers come next. Other waiting writers register again when there are
-- readers.
redis.call('DEL', KEYS[2])
return {1, 0}

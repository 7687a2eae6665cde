-- Takes a write hold, or one more.
-- KEYS[1]  lock hash
-- KEYS[2]  writers that wait for readers, a set that keeps new ones out
-- KEYS[3]  ticket, for an owner that the caller named only: see acquire_read_named.lua
-- ARGV[1]  lease in ms
-- ARGV[2]  owner
-- ARGV[3]  1 if it waits and may keep readers out
-- ARGV[4]  for how long it does, in ms, unless it tries again
-- ARGV[5]  after how many ms it has to try again at the latest
-- Reply: acquired {1, 0}; not {0, ms after which trying again may help, -1 if that
-- is not known}; the same and readers are kept out {2, ms}; refused because the owner
-- reads and would wait for itself {3, 0}.

local lease, field = tonumber(ARGV[1]), ARGV[2] .. ':write'
local ticket = KEYS[3] and redis.call('GET', KEYS[3])
if ticket and ticket ~= 'held' then -- released since
	return {0, -1}
end
local mode, reads, writes = unpack(redis.call('HMGET', KEYS[1], 'mode', ARGV[2], field))
-- A hash without a mode is a lock of another kind.
if mode ~= 'write' then
	writes = false
end
if writes and (ticket or not KEYS[3]) then
	-- An attempt was delivered twice: this one, or an earlier one of the same wait.
	-- The caller counts the lease from this one.
	holds.raise(KEYS[1], lease)
	if ticket then
		holds.raise(KEYS[3], lease)
	end
	return {1, 0}
end
if mode and reads and not writes then
	return {3, 0}
end
if not writes and redis.call('EXISTS', KEYS[1]) == 1 then
	local free_in = redis.call('PTTL', KEYS[1])
	if mode ~= 'read' or ARGV[3] ~= '1' then
		return {0, free_in}
	end
	-- All that wait are in one set, which whoever tries keeps alive: it is gone with
	-- the last to leave, or soon after the last has died.
	redis.call('SADD', KEYS[2], ARGV[2])
	local expires = redis.pcall('PEXPIRE', KEYS[2], ARGV[4])
	if expires ~= 1 then -- a user without that right must not keep them out for ever
		redis.call('SREM', KEYS[2], ARGV[2])
		return expires
	end
	local again = tonumber(ARGV[5])
	return {2, free_in < 0 and again or math.min(free_in, again)}
end
-- What can fail comes first, and leaves nothing.
if KEYS[3] then
	redis.call('SET', KEYS[3], 'held', 'PX', ARGV[1])
end
local done = redis.pcall('HSET', KEYS[1], 'mode', 'write', field, (writes or 0) + 1)
-- Re-entry does not cut short what the owner has asked for before.
if type(done) == 'number' and redis.call('PTTL', KEYS[1]) < lease then
	done = redis.pcall('PEXPIRE', KEYS[1], ARGV[1])
end
if type(done) ~= 'number' then -- a user without these rights must not take it for ever
	if KEYS[3] then
		redis.call('DEL', KEYS[3])
	end
	if writes then
		redis.pcall('HSET', KEYS[1], field, writes)
	else
		redis.call('DEL', KEYS[1])
	end
	return done
end
-- Whoever else waits to write says so again once there are readers: those who were
-- kept out have their turn before.
redis.call('DEL', KEYS[2])
return {1, 0}

-- Takes a read hold, or one more, for an owner that the caller named.
-- KEYS[1]  lock hash
-- KEYS[2]  writers that wait; who holds already passes them by
-- KEYS[3]  ticket: 'held' for as long as this hold has, and then what became of
--          it, so that each of its requests counts once and for no other hold
-- ARGV[1]  what the keys of read holds begin with
-- ARGV[2]  lease in ms
-- ARGV[3]  owner
-- Reply: as acquire_read.lua, without the list.

local lease, owner = tonumber(ARGV[2]), ARGV[3]
local ticket = redis.call('GET', KEYS[3])
if ticket and ticket ~= 'held' then -- released since
	return -1
end
local mode, count, writes = unpack(redis.call('HMGET', KEYS[1], 'mode', owner, owner .. ':write'))
if ticket and mode and count then
	-- An attempt was delivered twice: this one, or an earlier one of the same wait.
	-- The caller counts the lease from this one.
	holds.prolong(KEYS[1], ARGV[1], owner, count, lease)
	holds.raise(KEYS[3], lease)
	return 0
end
-- A hash without a mode is a lock of another kind.
local free = not mode and redis.call('EXISTS', KEYS[1]) == 0
if not (mode == 'read' and count or mode == 'write' and writes) then
	if not free and mode ~= 'read' then
		return -2 - redis.call('PTTL', KEYS[1])
	end
	if redis.call('EXISTS', KEYS[2]) == 1 then
		return -2 - redis.call('PTTL', KEYS[2])
	end
end
-- What can fail comes first, and leaves nothing.
redis.call('SET', KEYS[3], 'held', 'PX', ARGV[2])
local err = holds.admit(KEYS[1], ARGV[1], {{owner = owner, n = (count or 0) + 1, lease = lease}}, free and 'read')
if err then
	redis.call('DEL', KEYS[3])
	return err
end
return 0

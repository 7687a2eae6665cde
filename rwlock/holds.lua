-- What the scripts of the read-write lock share; it stands before each of them.
--
-- The lock is a hash. Its field mode is 'read' or 'write'; a reader has a field
-- with the number of its holds, the writer one whose name ends with ':write'. Each
-- read hold has a key besides, named by owner and number, that expires with it; the
-- hash lives as long as the longest of them, or as the write hold. Which keys there
-- are only the hash tells, so their names are made here and not declared: they share
-- its slot, but servers that refuse undeclared keys are not supported.

local holds = {}

-- By how many ms two times may differ that are the same: while a script runs, the
-- clock goes on, on servers before Redis 7.2 even for it.
local slack = 100
-- With so many holders it is worth while not to look at all of them.
local many = 4

-- The key of an owner's n-th read hold. prefix is what all such keys of the lock
-- begin with.
function holds.key(prefix, owner, n)
	return prefix .. owner .. ':rwlock_timeout:' .. n
end

-- Makes a key last at least ttl ms. Returns 0 if it is not there.
function holds.raise(key, ttl)
	if redis.call('PTTL', key) < ttl then
		return redis.call('PEXPIRE', key, ttl)
	end
	return 1
end

-- Makes all read holds of an owner who has count of them, and with them the lock, last
-- at least ttl ms: which of the keys is that of one hold is not known.
function holds.prolong(lock, prefix, owner, count, ttl)
	holds.raise(lock, ttl)
	for n = 1, tonumber(count) do
		local key = holds.key(prefix, owner, n)
		if holds.raise(key, ttl) == 0 then
			-- Evicted, or over. But nobody has written since it was taken, or its
			-- field were gone.
			redis.call('SET', key, 1, 'PX', ttl)
		end
	end
end

-- How many ms the longest read hold has left, not counting that of one owner; 0 if
-- none has any: then all that is left is of clients that died.
function holds.longest(lock, prefix, except)
	local longest, fields = 0, redis.call('HGETALL', lock)
	for i = 1, #fields, 2 do
		local owner, count = fields[i], tonumber(fields[i + 1]) -- no number for mode
		if count and owner ~= except then
			for n = 1, count do
				longest = math.max(longest, redis.call('PTTL', holds.key(prefix, owner, n)))
			end
		end
	end
	return longest
end

-- Gives each reader its n-th hold, in the mode that is given, or that the lock is
-- in if none is. readers are tables of owner, n and lease. Returns nil, or an error,
-- and nothing was done.
function holds.admit(lock, prefix, readers, mode)
	local fields, longest = {}, 0
	if mode then
		fields = {'mode', mode}
	end
	-- What can fail comes first: of the keys the first, or none.
	for _, r in ipairs(readers) do
		redis.call('SET', holds.key(prefix, r.owner, r.n), 1, 'PX', r.lease)
		fields[#fields + 1] = r.owner
		fields[#fields + 1] = r.n
		longest = math.max(longest, r.lease)
	end
	local done = redis.pcall('HSET', lock, unpack(fields))
	if type(done) == 'number' and redis.call('PTTL', lock) < longest then
		done = redis.pcall('PEXPIRE', lock, longest)
	end
	if type(done) == 'number' then
		return nil
	end
	-- A user without one of these rights must not take the lock for ever.
	for _, r in ipairs(readers) do
		redis.call('DEL', holds.key(prefix, r.owner, r.n))
		if r.n > 1 then
			redis.pcall('HSET', lock, r.owner, r.n - 1)
		else
			redis.pcall('HDEL', lock, r.owner)
		end
	end
	if redis.call('HLEN', lock) == 1 then
		redis.call('DEL', lock)
	end
	return done
end

-- Tells, without looking at all of them, whether there is a read hold that lasts as
-- long as the lock. Readers that came together, or are renewed together, all do.
local function another_lasts(lock, prefix, ttl)
	-- pcall: without this right all are looked at.
	local some = redis.pcall('HRANDFIELD', lock, many)
	for _, owner in ipairs(some) do
		local left = redis.call('PTTL', holds.key(prefix, owner, 1))
		if left > 0 and left >= ttl - slack then
			return true
		end
	end
	return false
end

-- Ends one read hold of an owner who has count of them, and returns whether the lock
-- is free. left is how many ms that hold had, if it is known.
function holds.end_read(lock, prefix, owner, count, left)
	-- Its key is the one with the least time that is enough for it. The last number
	-- goes, so the last key takes the place of that one: what stays is enough for the
	-- holds that stay. Not even by the slack may it be less.
	count = tonumber(count)
	local last = holds.key(prefix, owner, count)
	local rest = redis.call('PTTL', last)
	local key, gone = last, rest
	if left then
		local enough = math.max(left - slack, 0) -- a key that is gone is not enough
		for n = count - 1, 1, -1 do
			local ttl = redis.call('PTTL', holds.key(prefix, owner, n))
			if ttl >= enough and (ttl < gone or gone < enough) then
				key, gone = holds.key(prefix, owner, n), ttl
			end
		end
	end
	if key ~= last and rest > 0 then
		redis.pcall('PEXPIRE', key, rest)
	else
		redis.call('DEL', key)
	end
	redis.call('DEL', last)
	if count > 1 then
		redis.call('HINCRBY', lock, owner, -1)
	else
		redis.call('HDEL', lock, owner)
	end
	local others = redis.call('HLEN', lock) - 1
	if others == 0 then
		redis.call('DEL', lock)
		return true
	end
	if redis.call('HGET', lock, 'mode') ~= 'read' then
		return false -- the owner writes: its lock is not cut short
	end
	-- The lock has been given the time of every hold, and no more, so if the one
	-- that has ended had less than the lock has, it is another's that is the longest.
	-- It can have been given more by a Java writer that goes on reading, or by a
	-- server that was slow: that is put right when there are few.
	local ttl = redis.call('PTTL', lock)
	if others >= many and (gone >= 0 and gone < ttl - slack or another_lasts(lock, prefix, ttl)) then
		return false
	end
	local longest = holds.longest(lock, prefix)
	if longest <= 0 then
		redis.call('DEL', lock)
		return true
	end
	if ttl < 0 or longest < ttl then
		redis.pcall('PEXPIRE', lock, longest)
	end
	return false
end

-- Ends one of count write holds, and returns whether readers may enter: the lock is
-- free, or the writer goes on as a reader.
function holds.end_write(lock, prefix, field, count)
	if count ~= '1' then
		redis.call('HINCRBY', lock, field, -1)
		return false
	end
	redis.call('HDEL', lock, field)
	local longest = holds.longest(lock, prefix)
	if longest <= 0 then
		redis.call('DEL', lock)
	else
		redis.call('HSET', lock, 'mode', 'read')
		redis.pcall('PEXPIRE', lock, longest)
	end
	return true
end

-- Publishes a message and returns how many were told.
function holds.tell(command, channel, payload)
	-- pcall: who may not publish has released all the same, and waiters poll.
	local told = redis.pcall(command, channel, payload)
	return type(told) == 'number' and told or 0
end

-- The reply to a release that has nothing to end, else nil. count is how often the
-- owner holds; ticket is nil for an owner made for one acquisition. For which see
-- release_read.lua.
function holds.nothing_to_end(count, ticket, which)
	if not ticket then
		if not count then
			return 0
		end
		return count ~= '1' and -1 or nil
	end
	local state = redis.call('GET', ticket)
	if state == '0' or state == '1' then
		-- The result of an earlier delivery, as Redisson's unlock latch keeps it:
		-- 1 for free, 0 for still held.
		return 1 + tonumber(state)
	end
	if which ~= 'any' and state ~= 'held' then
		return 0
	end
	if not count then
		redis.call('DEL', ticket)
		return 0
	end
	return nil
end

-- Keeps what became of a release, for its repetitions. An acquisition that is undone
-- has none to come.
function holds.note(ticket, which, free, life)
	if ticket and which == 'undo' then
		redis.call('DEL', ticket)
	elseif ticket then
		redis.call('SET', ticket, free and 1 or 0, 'PX', life)
	end
end

-- Functions that the scripts of the read-write lock share. This text precedes each script.
--
-- The lock is a hash. Its field mode is 'read' or 'write'. A reader has a field with the
-- number of its holds; the name of the writer's field ends with ':write'. Each read hold
-- also has a key of its own, named by owner and number, which expires with the hold. The
-- hash lasts as long as the longest read hold or the write hold. Only the hash tells which
-- keys exist, so most scripts build the names of these keys instead of declaring them. The
-- keys are in the slot of the hash, but servers that refuse undeclared keys are not
-- supported. Scripts that use keys of several claims run only while the slot does not move.
--
-- Java counts the holds of an owner in its field. A script looks at the keys of all holds of the lock, but
-- whoever can write to the hash could make it do so for ever. So the holds are at most as many as those
-- of java.util.concurrent.locks.ReentrantReadWriteLock, of fewer owners, because Lua is slow with many names. A script
-- that would look at more fails before its first write.

local holds = {}

-- Two expiries that differ by at most this many ms count as equal: before Redis 7.2 the
-- clock advances while a script runs.
local slack = 100
-- The most holds of a lock, and their owners.
local most, most_owners = 65535, 10000
-- From these numbers of holders on, end_read avoids looking at all of them.
local some, many = 4, 32

-- Returns the key of an owner's n-th read hold. All such keys of the lock begin with
-- prefix.
function holds.key(prefix, owner, n)
	return prefix .. owner .. ':rwlock_timeout:' .. n
end

-- Makes a key last at least ttl ms. Returns 0 if the key does not exist.
function holds.raise(key, ttl)
	if redis.call('PTTL', key) < ttl then
		return redis.call('PEXPIRE', key, ttl)
	end
	return 1
end

-- Makes a read hold, and with it the lock, last at least ttl ms.
function holds.prolong(lock, key, ttl)
	holds.raise(lock, ttl)
	if holds.raise(key, ttl) == 0 then
		-- The key was evicted, or has expired. The field still exists, so there has
		-- been no writer since.
		redis.call('SET', key, 1, 'PX', ttl)
	end
end

-- The error of a script that would have to look at too many holds.
function holds.too_many()
	return redis.error_reply('ERR The lock has more than ' .. most_owners .. ' owners or ' .. most
		.. ' holds, or a field that is no number of holds')
end

-- Reports whether a lock with so many fields, one of which is its mode, has room for more.
function holds.fits(fields, more)
	return fields - 1 + more <= most_owners
end

-- Returns the owners of a lock, except one, and the numbers of their holds: two lists, or nil and an
-- error.
function holds.all(lock, except)
	if not holds.fits(redis.call('HLEN', lock), 0) then
		return nil, holds.too_many()
	end
	local owners, counts, sum = {}, {}, 0
	local fields = redis.call('HGETALL', lock)
	for i = 1, #fields, 2 do
		if fields[i] ~= 'mode' and fields[i] ~= except then
			local count = string.find(fields[i + 1], '^[1-9]%d?%d?%d?%d?$') and tonumber(fields[i + 1])
			sum = sum + (count or most + 1)
			if sum > most then
				return nil, holds.too_many()
			end
			owners[#owners + 1], counts[#counts + 1] = fields[i], count
		end
	end
	return owners, counts
end

-- Returns how many ms the longest read hold has left, not counting those of one owner. It
-- returns 0 if no hold has any time left: then all remaining holders have died. It returns nil and an error
-- if there are too many holds.
function holds.longest(lock, prefix, except)
	local owners, counts = holds.all(lock, except)
	if not owners then
		return nil, counts
	end
	local longest = 0
	for i, owner in ipairs(owners) do
		for n = 1, counts[i] do
			longest = math.max(longest, redis.call('PTTL', holds.key(prefix, owner, n)))
		end
	end
	return longest
end

-- Admits readers: a list of tables with claim and lease. mode is the new mode of the lock,
-- or nil to keep its mode. Returns nil, or an error if nothing was done.
function holds.admit(lock, prefix, readers, mode)
	local fields, longest = {}, 0
	if mode then
		fields = {'mode', mode}
	end
	-- SET fails for the first key or for none.
	for _, r in ipairs(readers) do
		redis.call('SET', holds.key(prefix, r.claim, 1), 1, 'PX', r.lease)
		fields[#fields + 1] = r.claim
		fields[#fields + 1] = 1
		longest = math.max(longest, r.lease)
	end
	local done = redis.pcall('HSET', lock, unpack(fields))
	if type(done) == 'number' and redis.call('PTTL', lock) < longest then
		done = redis.pcall('PEXPIRE', lock, longest)
	end
	if type(done) == 'number' then
		return nil
	end
	-- A user without one of these rights must not keep the lock for ever.
	for _, r in ipairs(readers) do
		redis.call('DEL', holds.key(prefix, r.claim, 1))
		redis.pcall('HDEL', lock, r.claim)
	end
	if redis.call('HLEN', lock) == 1 then
		redis.call('DEL', lock)
	end
	return done
end

-- Looks at some read holds, but not at one claim's, and reports whether one of them lasts about as long as the lock.
-- The expiries of holds that are renewed differ by a third of the lease, so one of 32 is
-- among the latest tenth, but hardly ever the very last.
local function another_lasts(lock, prefix, ttl, except)
	-- pcall: without this right end_read looks at all of them.
	local sample = redis.pcall('HRANDFIELD', lock, many)
	for _, owner in ipairs(sample) do
		if owner ~= except and ttl > 0 and redis.call('PTTL', holds.key(prefix, owner, 1)) >= ttl * 0.9 then
			return true
		end
	end
	return false
end

-- Ends a read claim of a lock in that mode, and returns whether the lock is free. It returns nil and an error, and
-- changes nothing, if there are too many holds.
function holds.end_read(lock, prefix, claim, mode)
	local key = holds.key(prefix, claim, 1)
	local gone = redis.call('PTTL', key)
	local others = redis.call('HLEN', lock) - 2
	local ttl, longest
	-- The write claim determines the expiry while there is one. Otherwise the lock lasts as long as its longest
	-- hold. If the hold that ends had less time than the lock, another hold is the longest, and the expiry stays. The
	-- lock can last longer than all holds after a downgrade by Java, or if the server was slow. That is
	-- corrected when there are few holders. With many it may last longer than the longest
	-- hold by a tenth, but never longer than it would have with the hold that ends.
	if others > 0 and mode == 'read' then
		ttl = redis.call('PTTL', lock)
		if not (others >= some and gone >= 0 and gone < ttl - slack
			or others >= many and another_lasts(lock, prefix, ttl, claim)) then
			local err
			longest, err = holds.longest(lock, prefix, claim)
			if err then
				return nil, err
			end
		end
	end
	redis.call('DEL', key)
	redis.call('HDEL', lock, claim)
	if others == 0 or longest and longest <= 0 then
		redis.call('DEL', lock)
		return true
	end
	if longest and (ttl < 0 or longest < ttl) then
		redis.pcall('PEXPIRE', lock, longest)
	end
	return false
end

-- Ends a write claim. After that the lock is free, or the writer goes on as a reader. It returns an error, and
-- changes nothing, if there are too many holds.
function holds.end_write(lock, prefix, field)
	local longest, err = 0
	if redis.call('HLEN', lock) > 2 then
		longest, err = holds.longest(lock, prefix, field)
		if err then
			return err
		end
	end
	redis.call('HDEL', lock, field)
	if longest <= 0 then
		redis.call('DEL', lock)
	else
		redis.call('HSET', lock, 'mode', 'read')
		redis.pcall('PEXPIRE', lock, longest)
	end
end

-- Publishes a message and returns the number of receivers.
function holds.publish(command, channel, payload)
	-- pcall: without this right the release succeeds all the same, and waiters poll.
	local receivers = redis.pcall(command, channel, payload)
	return type(receivers) == 'number' and receivers or 0
end

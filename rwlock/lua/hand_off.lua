-- Passes the lock on to its successors, readers or one writer, without freeing it in
-- between. If there are other holders, and the successors cannot enter beside them, the
-- claim is released instead.
-- KEYS[1]      lock hash
-- KEYS[2]      waiting writers
-- ARGV[1]      prefix of the keys of read holds
-- ARGV[2]      claim that passes the lock on
-- ARGV[3]      command that publishes
-- ARGV[4]      channel
-- ARGV[5]      payload
-- ARGV[6]      read or write: kind of that claim
-- ARGV[7]      read or write: kind of the successors
-- ARGV[2i+6]   lease of the i-th successor in ms
-- ARGV[2i+7]   the successor's claim
-- Reply: -1 if the lock was passed on; 0 if the claim does not stand, and nothing was
-- done; otherwise the claim was released, and the reply is that of release_read.lua.

local lock, prefix, claim, from, to = KEYS[1], ARGV[1], ARGV[2], ARGV[6], ARGV[7]
local function field(of, kind)
	return kind == 'write' and of .. ':write' or of
end

local has = field(claim, from)
local mode, held = unpack(redis.call('HMGET', lock, 'mode', has))
if not mode then
	return 0
end

-- Splits the successors into those that hold the lock already and the others.
local here, coming, longest = {}, {}, 0
for i = 8, #ARGV, 2 do
	local successor = {lease = tonumber(ARGV[i]), claim = ARGV[i + 1]}
	local known = redis.call('HGET', lock, field(successor.claim, to))
	if i == 8 and not held and not known then
		return 0
	end
	local list = known and here or coming
	list[#list + 1] = successor
	longest = math.max(longest, successor.lease)
end

-- The former were let in by an earlier delivery of this request or of an attempt. Their
-- leases may have been extended since.
for _, successor in ipairs(here) do
	if to == 'write' then
		holds.raise(lock, successor.lease)
	else
		holds.prolong(lock, prefix, successor.claim, successor.lease)
	end
end
if not held then
	return -1
end

local function release()
	if from == 'write' then
		holds.end_write(lock, prefix, has)
	elseif not holds.end_read(lock, prefix, claim) then
		return 1
	end
	return 2 + holds.publish(ARGV[3], ARGV[4], ARGV[5])
end

if mode ~= from then
	return release() -- the reader also writes
end
if to == 'write' then
	if redis.call('HLEN', lock) > 2 and holds.longest(lock, prefix, has) > 0 then
		return release()
	end
	-- Only the expiry can fail. It comes first, so that nothing has changed then.
	redis.call('PEXPIRE', lock, longest)
	for _, old in ipairs(redis.call('HKEYS', lock)) do
		if old ~= 'mode' then -- the claim, and readers that died
			redis.call('HDEL', lock, old)
		end
	end
	redis.call('HSET', lock, 'mode', 'write', field(ARGV[9], to), 1)
	if from == 'read' then
		redis.call('DEL', holds.key(prefix, claim, 1))
	end
	redis.call('DEL', KEYS[2])
	return -1
end
local waiting = redis.call('EXISTS', KEYS[2]) == 1
if from == 'read' then
	if waiting then
		return release() -- the waiting writer comes first
	end
	local err = #coming > 0 and holds.admit(lock, prefix, coming)
	if err then
		return err
	end
	holds.end_read(lock, prefix, claim)
	return -1
end
redis.call('PEXPIRE', lock, math.max(longest, holds.longest(lock, prefix)))
local err = #coming > 0 and holds.admit(lock, prefix, coming, 'read')
if err then
	return err
end
redis.call('HDEL', lock, has)
if not waiting then
	-- Readers of other processes can enter as well.
	holds.publish(ARGV[3], ARGV[4], ARGV[5])
end
return -1

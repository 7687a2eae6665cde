-- Passes a hold on to readers, or to one writer, without letting go of the lock. If
-- others hold it too and the next cannot join them, it is released instead.
-- KEYS[1]      lock hash
-- KEYS[2]      writers that wait
-- ARGV[1]      what the keys of read holds begin with
-- ARGV[2]      owner who has it
-- ARGV[3]      command that publishes
-- ARGV[4]      channel
-- ARGV[5]      payload
-- ARGV[6]      read or write: what the owner has
-- ARGV[7]      read or write: what the next get
-- ARGV[2i+6]   lease of the i-th of the next in ms
-- ARGV[2i+7]   the owner
-- Reply: -1 passed on; 1 and more released instead, as release_read.lua; 0 the first
-- owner does not hold it exactly once, and nothing was done.

local lock, prefix, owner, from, to = KEYS[1], ARGV[1], ARGV[2], ARGV[6], ARGV[7]
local function field(of, kind)
	return kind == 'write' and of .. ':write' or of
end

local has = field(owner, from)
local mode, count = unpack(redis.call('HMGET', lock, 'mode', has))
if not mode or count and count ~= '1' then
	return 0
end

-- Splits the next into those who are there and those who are to come.
local here, coming, longest = {}, {}, 0
for i = 8, #ARGV, 2 do
	local next = {lease = tonumber(ARGV[i]), owner = ARGV[i + 1]}
	local known = redis.call('HGET', lock, field(next.owner, to))
	next.n = known or 1
	if i == 8 and not count and not known then
		return 0
	end
	local list = known and here or coming
	list[#list + 1] = next
	longest = math.max(longest, next.lease)
end

-- Nobody else has these owners, so who is there was let in by this request, delivered
-- before, or by an attempt that was. Its lease may have been extended since.
for _, next in ipairs(here) do
	if to == 'write' then
		holds.raise(lock, next.lease)
	else
		holds.prolong(lock, prefix, next.owner, next.n, next.lease)
	end
end
if not count then
	return -1
end

local function release()
	local free
	if from == 'write' then
		free = holds.end_write(lock, prefix, has, count)
	else
		free = holds.end_read(lock, prefix, owner, count)
	end
	return free and 2 + holds.tell(ARGV[3], ARGV[4], ARGV[5]) or 1
end

if mode ~= from then
	return release() -- the owner reads, and goes on writing
end
if to == 'write' then
	if redis.call('HLEN', lock) > 2 and holds.longest(lock, prefix, has) > 0 then
		return release()
	end
	-- The expiry comes first: it alone can fail, and then nothing has moved.
	redis.call('PEXPIRE', lock, longest)
	for _, old in ipairs(redis.call('HKEYS', lock)) do
		if old ~= 'mode' then -- also readers that died
			redis.call('HDEL', lock, old)
		end
	end
	redis.call('HSET', lock, 'mode', 'write', field(ARGV[9], to), 1)
	if from == 'read' then
		redis.call('DEL', holds.key(prefix, owner, 1))
	end
	redis.call('DEL', KEYS[2])
	return -1
end
local waiting = redis.call('EXISTS', KEYS[2]) == 1
if from == 'read' then
	if waiting then
		return release() -- it is the writer's turn
	end
	local err = #coming > 0 and holds.admit(lock, prefix, coming)
	if err then
		return err
	end
	holds.end_read(lock, prefix, owner, count)
	return -1
end
redis.call('PEXPIRE', lock, math.max(longest, holds.longest(lock, prefix)))
local err = #coming > 0 and holds.admit(lock, prefix, coming, 'read')
if err then
	return err
end
redis.call('HDEL', lock, has)
if not waiting then
	-- Readers of other processes can enter too.
	holds.tell(ARGV[3], ARGV[4], ARGV[5])
end
return -1

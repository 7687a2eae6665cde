-- Takes the lock, or takes it once more, for an owner that the caller named.
-- KEYS[1]  lock hash
-- KEYS[2]  ticket: what became of this request, so that it counts once
-- KEYS[3]  fencing counter, for a fenced lock only
-- ARGV[1]  lease in ms
-- ARGV[2]  owner
-- ARGV[3]  1 if the owner may hold more than once
-- Reply: as acquire.lua; nil if the owner holds and may not hold again.

-- Neither re-entry nor a repetition cuts short what the owner has asked for
-- before.
local function expire()
	if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then
		redis.call('PEXPIRE', KEYS[1], ARGV[1])
	end
end

local ticket = redis.call('GET', KEYS[2])
if ticket == 'held' and redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then
	-- An attempt was delivered twice: this one, or an earlier one of the same wait.
	-- The caller counts the lease from this one.
	expire()
	return KEYS[3] and tonumber(redis.call('GET', KEYS[3])) or 0
end
if ticket and ticket ~= 'held' then -- released since
	return -1
end
if redis.call('EXISTS', KEYS[1]) == 1 then
	if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
		return -2 - redis.call('PTTL', KEYS[1])
	end
	if ARGV[3] ~= '1' then
		return false
	end
end
-- The counter comes first: it alone can fail, and then nothing is taken.
local token = KEYS[3] and redis.call('INCR', KEYS[3]) or 0
redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
expire()
redis.call('SET', KEYS[2], 'held', 'PX', ARGV[1])
return token

-- Takes the lock for readers.
-- KEYS[1]      lock hash
-- KEYS[2]      waiting writers: while there are any, no new reader enters. That holds for a
--              free lock too, or the writer that hears of the release would find it taken
-- ARGV[1]      prefix of the keys of read holds
-- ARGV[3i-1]   lease of the i-th claim in ms
-- ARGV[3i]     the claim
-- ARGV[3i+1]   write claim of the same owner, beside which it may enter, or ''
-- Reply: for each claim 0 if it is acquired, else -2 - ms. After that many ms another
-- attempt may succeed; -1 means that what keeps it out has no expiry.

local mode = redis.call('HGET', KEYS[1], 'mode')
local fields = redis.call('HLEN', KEYS[1])
local free = fields == 0
-- A lock without a mode is of another kind.
if not free and not kinds.of(KEYS[1], fields) then
	return kinds.foreign()
end
if not holds.fits(fields, (#ARGV - 1) / 3) then
	return holds.too_many()
end
local open = free or mode == 'read'
local answers, readers, refused = {}, {}, 0
if open and redis.call('EXISTS', KEYS[2]) == 1 then
	open, refused = false, -2 - redis.call('PTTL', KEYS[2])
elseif not open then
	refused = -2 - redis.call('PTTL', KEYS[1])
end
if not open and refused == 0 then -- it has expired since, which does not mean that the claim is acquired
	refused = -2
end
if refused == -2 then -- a replica of Redis 6.2 keeps what has expired, and refuses this, which has no effect
	redis.call('HDEL', KEYS[1], '')
end
for i = 2, #ARGV, 3 do
	local lease, claim, writer = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2]
	local answer = 0
	if mode and redis.call('HEXISTS', KEYS[1], claim) == 1 then
		-- This attempt, or an earlier one of the same claim, was delivered twice. The
		-- caller counts the lease from this one.
		holds.prolong(KEYS[1], holds.key(ARGV[1], claim, 1), lease)
	elseif open or mode == 'write' and redis.call('HEXISTS', KEYS[1], writer .. ':write') == 1 then
		readers[#readers + 1] = {claim = claim, lease = lease}
	else
		answer = refused
	end
	answers[#answers + 1] = answer
end
if #readers > 0 then
	local err = holds.admit(KEYS[1], ARGV[1], readers, free and 'read')
	if err then
		return err
	end
end
return answers

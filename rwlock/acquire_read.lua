-- Takes read holds for owners made for one acquisition each.
-- KEYS[1]      lock hash
-- KEYS[2]      writers that wait: while there are any, no new reader enters, not even
--              when the lock is free, or the writer who was told would find it taken
-- ARGV[1]      what the keys of read holds begin with
-- ARGV[2i]     lease of the i-th owner in ms
-- ARGV[2i+1]   the owner
-- Reply: for each owner, acquired, 0; not, -2 - the ms after which trying again may
-- help, which is negative also when that is not known (-1).

local mode = redis.call('HGET', KEYS[1], 'mode')
-- A hash without a mode is a lock of another kind.
local free = not mode and redis.call('EXISTS', KEYS[1]) == 0
local open = free or mode == 'read'
local answers, readers, refused = {}, {}, 0
if open and redis.call('EXISTS', KEYS[2]) == 1 then
	open, refused = false, -2 - redis.call('PTTL', KEYS[2])
elseif not open then
	refused = -2 - redis.call('PTTL', KEYS[1])
end
for i = 2, #ARGV, 2 do
	local lease, owner = tonumber(ARGV[i]), ARGV[i + 1]
	local answer, count = 0, mode and redis.call('HGET', KEYS[1], owner)
	if count then
		-- Nobody else has this owner, so an attempt was delivered twice: this one, or
		-- an earlier one of the same wait. The caller counts the lease from this one.
		holds.prolong(KEYS[1], ARGV[1], owner, count, lease)
	elseif open or mode == 'write' and redis.call('HEXISTS', KEYS[1], owner .. ':write') == 1 then
		readers[#readers + 1] = {owner = owner, n = 1, lease = lease}
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

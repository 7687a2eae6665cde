-- The operations of a Java client on a semaphore.
-- KEYS[1]   number of free permits
-- KEYS[2]   acquired permits
-- ARGV[1]   operation
-- ARGV[2]   channel
-- ARGV[3]   number of permits, or the time by the client's clock in ms
-- ARGV[4..] see below
-- Reply: 1 if the operation succeeded, else 0; or a number of permits.
local key, taken = unpack(KEYS)
local operation, channel, n, more = unpack(ARGV)
local java = {}

function java.acquire()
	local free = redis.call('GET', key)
	if not free or tonumber(free) < tonumber(n) then
		return 0
	end
	redis.call('DECRBY', key, n)
	return 1
end

function java.release()
	redis.call('PUBLISH', channel, redis.call('INCRBY', key, n))
	return 1
end

function java.drain()
	local free = redis.call('GET', key)
	if not free then
		return 0
	end
	redis.call('SET', key, 0)
	return tonumber(free)
end

-- more is the payload: delta for leased permits, else total.
function java.add()
	local total = (redis.call('GET', key) or 0) + n
	redis.call('SET', key, total)
	if more == 'total' then
		redis.call('PUBLISH', channel, total)
	elseif tonumber(n) > 0 then
		redis.call('PUBLISH', channel, n)
	end
	return 1
end

-- Frees at most max expired permits.
local function sweep(max)
	local expired = redis.call('ZRANGEBYSCORE', taken, 0, n, 'LIMIT', 0, max)
	if #expired > 0 then
		redis.call('ZREM', taken, unpack(expired))
		local free = redis.call('INCRBY', key, #expired)
		if free > 0 then
			redis.call('PUBLISH', channel, free)
		end
	end
end

-- more is the expiry of the permits, and the ids follow.
function java.permit_acquire()
	sweep(#ARGV - 4)
	local free = redis.call('GET', key)
	if not free or tonumber(free) < #ARGV - 4 then
		return 0
	end
	redis.call('DECRBY', key, #ARGV - 4)
	for i = 5, #ARGV do
		redis.call('ZADD', taken, more, ARGV[i])
	end
	local ttl = redis.call('PTTL', key)
	if ttl > 0 then
		redis.call('PEXPIRE', taken, ttl)
	end
	return 1
end

-- more is the permit.
function java.permit_release()
	local at = redis.call('ZSCORE', taken, more)
	if not at then
		return 0
	end
	redis.call('ZREM', taken, more)
	redis.call('PUBLISH', channel, redis.call('INCRBY', key, 1))
	return tonumber(at) > tonumber(n) and 1 or 0
end

function java.permit_sweep()
	sweep(-1)
	return tonumber(redis.call('GET', key) or 0)
end

return java[operation]()

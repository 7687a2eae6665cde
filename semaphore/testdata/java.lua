-- What a Java client does to a semaphore, in our words.
-- KEYS[1]   permits
-- KEYS[2]   permits that are taken
-- ARGV[1]   what
-- ARGV[2]   channel
-- ARGV[3]   how many permits, or the time by the client's clock, in ms
-- ARGV[4..] see below
-- Reply: 1 if it is done, else 0; or a number of permits.
local key, taken = unpack(KEYS)
local what, channel, n, more = unpack(ARGV)
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

-- more is delta if the permits expire, else total.
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

-- Takes back at most so many permits that have expired.
local function sweep(most)
	local expired = redis.call('ZRANGEBYSCORE', taken, 0, n, 'LIMIT', 0, most)
	if #expired > 0 then
		redis.call('ZREM', taken, unpack(expired))
		local free = redis.call('INCRBY', key, #expired)
		if free > 0 then
			redis.call('PUBLISH', channel, free)
		end
	end
end

-- more is when the permits expire; behind it they follow.
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

return java[what]()

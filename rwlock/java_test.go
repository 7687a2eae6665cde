package rwlock_test

import "github.com/redlatch/redlatch/internal/wire"

// javaScripts do what Redisson's scripts do to the same lock, including their defects. KEYS[1]
// is the lock, KEYS[2] the channel, ARGV[1] the prefix of the keys of read holds, ARGV[2] the
// owner, ARGV[3] the lease.
var javaScripts = map[string]*wire.Script{
	"java read": wire.NewScript(`
		local mode = redis.call('HGET', KEYS[1], 'mode')
		if mode and mode ~= 'read' and redis.call('HEXISTS', KEYS[1], ARGV[2] .. ':write') == 0 then
			return redis.call('PTTL', KEYS[1])
		end
		if not mode then
			redis.call('HSET', KEYS[1], 'mode', 'read')
		end
		local n = redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
		redis.call('SET', ARGV[1] .. ARGV[2] .. ':rwlock_timeout:' .. n, 1, 'PX', ARGV[3])
		redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ARGV[3]))
		return -1`),
	"java write": wire.NewScript(`
		local mode, field = redis.call('HGET', KEYS[1], 'mode'), ARGV[2] .. ':write'
		if not mode then
			redis.call('HSET', KEYS[1], 'mode', 'write', field, 1)
			redis.call('PEXPIRE', KEYS[1], ARGV[3])
		elseif mode == 'write' and redis.call('HEXISTS', KEYS[1], field) == 1 then
			redis.call('HINCRBY', KEYS[1], field, 1)
			redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]) + ARGV[3])
		end
		return redis.call('PTTL', KEYS[1])`),
	// Sets the lock's time to that of the longest read hold even while the owner writes.
	"java unread": wire.NewScript(`
		local count = redis.call('HGET', KEYS[1], ARGV[2])
		if not count then
			if redis.call('EXISTS', KEYS[1]) == 0 then
				redis.call('PUBLISH', KEYS[2], '0')
			end
			return 0
		end
		if redis.call('HINCRBY', KEYS[1], ARGV[2], -1) == 0 then
			redis.call('HDEL', KEYS[1], ARGV[2])
		end
		redis.call('DEL', ARGV[1] .. ARGV[2] .. ':rwlock_timeout:' .. count)
		if redis.call('HLEN', KEYS[1]) > 1 then
			local longest = -3
			for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
				for n = 1, tonumber(redis.call('HGET', KEYS[1], field)) or 0 do
					longest = math.max(longest, redis.call('PTTL', ARGV[1] .. field .. ':rwlock_timeout:' .. n))
				end
			end
			if longest > 0 then
				return redis.call('PEXPIRE', KEYS[1], longest)
			end
			if redis.call('HGET', KEYS[1], 'mode') == 'write' then
				return 0
			end
		end
		redis.call('DEL', KEYS[1])
		return redis.call('PUBLISH', KEYS[2], '0')`),
	// Publishes nothing when the writer goes on as a reader, and leaves the lock its time.
	"java unwrite": wire.NewScript(`
		local field = ARGV[2] .. ':write'
		if redis.call('HGET', KEYS[1], 'mode') ~= 'write' or redis.call('HEXISTS', KEYS[1], field) == 0 then
			return 0
		end
		if redis.call('HINCRBY', KEYS[1], field, -1) > 0 then
			return redis.call('PEXPIRE', KEYS[1], 30000)
		end
		redis.call('HDEL', KEYS[1], field)
		if redis.call('HLEN', KEYS[1]) == 1 then
			redis.call('DEL', KEYS[1])
			return redis.call('PUBLISH', KEYS[2], '1')
		end
		return redis.call('HSET', KEYS[1], 'mode', 'read')`),
	// Cuts the lock short if others hold it for longer.
	"java renew": wire.NewScript(`
		local count = redis.call('HGET', KEYS[1], ARGV[2])
		if not count then
			return 0
		end
		for n = 1, count do
			redis.call('PEXPIRE', ARGV[1] .. ARGV[2] .. ':rwlock_timeout:' .. n, 30000)
		end
		return redis.call('PEXPIRE', KEYS[1], 30000)`),
	"java delete": wire.NewScript(`
		return redis.call('DEL', KEYS[1])`),
}

-- Does what nobody should.
-- KEYS     lock, list, deadlines, signs of life
-- ARGV[1]  what
-- ARGV[2]  an owner
-- ARGV[3]  how long a lease is, in ms
if ARGV[1] == 'persist' then
	redis.call('PERSIST', KEYS[1])
elseif ARGV[1] == 'push' then
	redis.call('RPUSH', KEYS[2], ARGV[2])
elseif ARGV[1] == 'take out' then
	redis.call('LREM', KEYS[2], 0, ARGV[2])
elseif ARGV[1] == 'twice' then
	redis.call('HSET', KEYS[1], ARGV[2], 2)
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
else
	redis.call('DEL', KEYS[tonumber(ARGV[1])])
end

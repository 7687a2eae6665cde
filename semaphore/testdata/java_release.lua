-- What Redisson does to give permits of a semaphore back.
-- KEYS[1]  permits
-- ARGV[1]  how many
-- ARGV[2]  channel
redis.call('PUBLISH', ARGV[2], redis.call('INCRBY', KEYS[1], ARGV[1]))
return {1}

-- Tells whether anybody reads, or whether anybody writes.
-- KEYS[1]  lock hash
-- ARGV[1]  read or write
-- Reply: 1 or 0.

local mode = redis.call('HGET', KEYS[1], 'mode')
-- With a writer, more than the mode and its own field are its holds as a reader.
local reads = mode == 'write' and ARGV[1] == 'read' and redis.call('HLEN', KEYS[1]) > 2
return (mode == ARGV[1] or reads) and 1 or 0

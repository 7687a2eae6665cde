-- Reports whether there are readers, or whether there is a writer.
-- KEYS[1]  lock hash
-- ARGV[1]  read or write
-- Reply: 1 or 0.

local mode = redis.call('HGET', KEYS[1], 'mode')
-- Fields other than the mode and the writer are read claims of the writer.
local reads = mode == 'write' and ARGV[1] == 'read' and redis.call('HLEN', KEYS[1]) > 2
return (mode == ARGV[1] or reads) and 1 or 0

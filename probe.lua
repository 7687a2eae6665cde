-- Checks the rights of this user and reads the clock, without side effects.
--ARGV   commands, each as the number of its words and the words
--Reply: seconds and microseconds of the clock, 0 if it may not be read; 1 if the server
--can check rights, else 0; then the number, from 1, of each command that is not
--permitted, negative if the server does not support it.

local reply = {0, 0, 0}
local time = redis.pcall('TIME')
if not time.err then
	reply[1], reply[2] = tonumber(time[1]), tonumber(time[2])
end
if not redis.acl_check_cmd then -- before Redis 7.0
	return reply
end
reply[3] = 1
local at, number = 1, 1
while at <= #ARGV do
	local last = at + tonumber(ARGV[at])
	local known, allowed = pcall(redis.acl_check_cmd, unpack(ARGV, at + 1, last))
	if not known then
		reply[#reply + 1] = -number
	elseif not allowed then
		reply[#reply + 1] = number
	end
	at, number = last + 1, number + 1
end
return reply

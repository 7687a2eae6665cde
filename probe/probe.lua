-- Checks the rights of this user and reads the clock, without side effects.
--ARGV   commands that the server would accept, each as the number of its words and the words
--Reply: seconds and microseconds of the clock, 0 if it may not be read; 1 if the server
--can check rights, else 0; then for each command 1 if it is permitted, 0 if not, -1 if the
--server does not support it, and -2 if that is unknown.

local function verdict(...)
	local checked, permitted = pcall(redis.acl_check_cmd, ...)
	if checked then
		return permitted and 1 or 0
	end
	-- A check that fails says nothing about the command. Its name alone has too few arguments
	-- to run or is harmless, and the server says so if it does not know the name.
	local reply = redis.pcall((...))
	local unsupported = type(reply) == 'table' and reply.err and reply.err:find('[Uu]nknown.* command')
	return unsupported and -1 or -2
end

local reply = {0, 0, redis.acl_check_cmd and 1 or 0} -- 0 before Redis 7.0
local time = redis.pcall('TIME')
if not time.err then
	reply[1], reply[2] = tonumber(time[1]), tonumber(time[2])
end
local at = 1
while at <= #ARGV do
	local last = at + tonumber(ARGV[at])
	reply[#reply + 1] = verdict(unpack(ARGV, at + 1, last))
	at = last + 1
end
return reply

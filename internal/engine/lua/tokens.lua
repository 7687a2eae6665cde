-- Checks counters of fencing tokens. Go puts this file before the scripts that draw tokens.
local tokens = {}

-- The largest token is the largest number below which Lua, JSON and JavaScript know every integer.
local max = 9007199254740991

-- last returns the last token of a counter, 0 if there is none, given the reply to the command that reads it. The
-- second result is an error, and the first nil, unless n more tokens can be drawn.
function tokens.last(reply, n)
	if type(reply) == 'table' and not string.find(reply.err, 'WRONGTYPE') then
		return nil, reply
	end
	local last = reply or '0'
	if last == '0' or type(last) == 'string' and string.find(last, '^[1-9]%d*$') then
		last = tonumber(last)
		if last + n >= 1 and last + n <= max then
			return last
		end
	end
	local code = type(reply) == 'table' and 'WRONGTYPE' or 'ERR'
	return nil, redis.error_reply(code .. ' The fencing counter does not allow a token from 1 to '
		.. string.format('%d', max) .. ': it is of another type, negative or too high')
end

-- Stands before a script in the tests and gives it a clock that only the test
-- moves, and keys that expire by it. What is published is noted.
--   test:clock      the time in ms
--   test:expiry     hash: when each key expires
--   test:published  list: channels and payloads
--   test:denied     a command that the user has no right to
local server, redis = redis, {sha1hex = redis.sha1hex}
local clock = tonumber(server.call('GET', 'test:clock'))
local denied = server.call('GET', 'test:denied')

-- look lets a key expire, as any access does.
local function look(key)
	local at = server.call('HGET', 'test:expiry', key)
	local exists = server.call('EXISTS', key) == 1
	if at and (not exists or tonumber(at) < clock) then
		server.call('DEL', key)
		server.call('HDEL', 'test:expiry', key)
		return false
	end
	return exists, at
end

local virtual = {
	TIME = function()
		return {tostring(math.floor(clock / 1000)), tostring(clock % 1000 * 1000 + 999)}
	end,
	PTTL = function(key)
		local exists, at = look(key)
		if not exists then
			return -2
		end
		return at and at - clock or -1
	end,
	PEXPIRE = function(key, ms)
		if not look(key) then
			return 0
		end
		server.call('HSET', 'test:expiry', key, clock + ms)
		if tonumber(ms) <= 0 then
			server.call('DEL', key)
		end
		return 1
	end,
	SET = function(key, value, px, ms)
		server.call('HDEL', 'test:expiry', key)
		if px then
			server.call('HSET', 'test:expiry', key, clock + ms)
		end
		return server.call('SET', key, value)
	end,
	EXISTS = function(key)
		return look(key) and 1 or 0
	end,
	PUBLISH = function(channel, payload)
		server.call('RPUSH', 'test:published', channel .. ' ' .. payload)
		return 3
	end,
}

function redis.call(command, key, ...)
	if command == denied then
		error({err = 'NOPERM this user may not ' .. command})
	end
	if virtual[command] then
		return virtual[command](key, ...)
	end
	look(key)
	return server.call(command, key, ...)
end

function redis.pcall(...)
	local ok, reply = pcall(redis.call, ...)
	if not ok and type(reply) ~= 'table' then
		reply = {err = reply}
	end
	return reply
end

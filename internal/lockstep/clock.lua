-- Prepended to every script. It replaces the server's clock by a virtual one, by which keys
-- also expire, and denies a command. Messages are kept instead of being published.
--   test:clock   virtual time in ms
--   test:denied  command that the script may not use
--   test:expiry  hash: expiry of each key
--   test:told    list: channels and messages since the last dump
local redis = (function(server)
	local clock, denied = unpack(server.call('MGET', 'test:clock', 'test:denied'))
	clock = tonumber(clock)

	local expiry, flat = {}, server.call('HGETALL', 'test:expiry')
	for i = 1, #flat, 2 do
		expiry[flat[i]] = tonumber(flat[i + 1])
	end

	local function expire(key, at)
		expiry[key] = at
		if at then
			server.call('HSET', 'test:expiry', key, at)
		else
			server.call('HDEL', 'test:expiry', key)
		end
	end

	-- Deletes a key that has expired, and removes the expiry of a key that does not exist.
	local function exists(key)
		local at = expiry[key]
		if at and at < clock then
			server.call('DEL', key)
		end
		local found = server.call('EXISTS', key) == 1
		if at and not found then
			expire(key, nil)
		end
		return found
	end

	local virtual = {
		TIME = function()
			return {tostring(math.floor(clock / 1000)), tostring(clock % 1000 * 1000 + 999)}
		end,
		PTTL = function(key)
			if not exists(key) then
				return -2
			end
			return expiry[key] and expiry[key] - clock or -1
		end,
		PEXPIRE = function(key, ms)
			if not exists(key) then
				return 0
			end
			expire(key, clock + ms)
			if tonumber(ms) <= 0 then
				server.call('DEL', key)
			end
			return 1
		end,
		PERSIST = function(key)
			if not exists(key) or not expiry[key] then
				return 0
			end
			expire(key, nil)
			return 1
		end,
		SET = function(key, value, px, ms)
			local reply = server.call('SET', key, value)
			if px or expiry[key] then
				expire(key, px and clock + ms or nil)
			end
			return reply
		end,
		EXISTS = function(...)
			local n = 0
			for _, key in ipairs({...}) do
				n = n + (exists(key) and 1 or 0)
			end
			return n
		end,
		DEL = function(...)
			local n = 0
			for _, key in ipairs({...}) do
				if exists(key) then
					n = n + server.call('DEL', key)
					exists(key)
				end
			end
			return n
		end,
		PUBLISH = function(channel, message)
			server.call('RPUSH', 'test:told', channel .. ' ' .. message)
			return 3
		end,
	}

	local redis = setmetatable({}, {__index = server})

	function redis.call(command, key, ...)
		if command == denied then
			error({err = 'NOPERM this user may not ' .. command})
		end
		if virtual[command] then
			return virtual[command](key, ...)
		end
		if expiry[key] then
			exists(key)
		end
		return server.call(command, key, ...)
	end

	function redis.pcall(...)
		local ok, reply = pcall(redis.call, ...)
		if not ok and type(reply) ~= 'table' then
			reply = {err = reply}
		end
		return reply
	end

	return redis
end)(redis)

-- Functions that tell the locks from other hashes. Go puts this file before the scripts that grant or free
-- a lock, or wait for it, without having a claim to it.
--
-- The hash of a lock has one field, its owner: the UUID of a client, a colon, and the number of a
-- claim or of a Java thread. That of a read-write lock has a field mode, and one for each reader,
-- or for the writer, whose name ends with ':write'.
local kinds = {}

-- is_owner reports whether a field is that of an owner, or of a writer.
function kinds.is_owner(field)
	local client, rest = field:sub(1, 36), field:sub(37)
	return client:find('^%x+%-%x+%-%x+%-%x+%-%x+$') ~= nil and (rest:find('^:%d+$') or rest:find('^:%d+:write$')) ~= nil
end

-- of returns 'lock' for the hash of a lock, the mode of a read-write lock, and nil for any other
-- hash. It gets the number of fields.
function kinds.of(key, fields)
	if fields == 1 then
		local field = redis.call('HKEYS', key)[1]
		-- Where the clock advances while a script runs, as in some emulations, the key may have expired by now.
		return (not field or kinds.is_owner(field)) and 'lock' or nil
	end
	local mode = redis.call('HGET', key, 'mode')
	if mode ~= 'read' and mode ~= 'write' then
		return nil
	end
	-- An application may have a field mode too. One of any two fields is not that one. pcall: without this right
	-- the mode decides.
	for _, field in ipairs(redis.pcall('HRANDFIELD', key, 2)) do
		if field ~= 'mode' and not kinds.is_owner(field) then
			return nil
		end
	end
	return mode
end

-- foreign is the reply for a hash that the script must not change.
function kinds.foreign()
	return redis.error_reply('WRONGTYPE The hash at this key is not such a lock')
end

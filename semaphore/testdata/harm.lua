-- Does by hand what nobody announces.
-- KEYS     keys
-- ARGV[1]  del, or for how many ms they are to last
for _, key in ipairs(KEYS) do
	if ARGV[1] == 'del' then
		server.call('DEL', key)
	else
		redis.call('PEXPIRE', key, ARGV[1])
	end
end
return {1}

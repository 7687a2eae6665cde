-- Acquires permits for a batch of requests, in order, as far as they are free.
-- KEYS         see limiter.lua
-- ARGV[1]      client, '' if its requests do not wait
-- ARGV[2]      ms for which a client keeps the turn that does not come again in time
-- ARGV[3..6]   rate, interval, type and keepAliveTime with which a missing limiter is created; the first is '' if
--              it is not
-- ARGV[7]      number of requests
-- ARGV[8..]    for each request: its permits, the ms it has waited, its entry, and 1 if it may have run before
-- ARGV[n]      the last one: the rate that this client knows, '' if it knows none
-- Reply: the number of requests served; the microseconds until the next one should try again; the number of free
-- permits, which is negative if the rate was lowered; the rate; and the interval. -1 if there is no limiter.

local call = redis.call

local failed = limiter.load()
if failed and failed[1] == -1 and ARGV[3] ~= '' then
	for i, field in ipairs({'rate', 'interval', 'type', 'keepAliveTime'}) do
		call('HSETNX', KEYS[1], field, ARGV[2 + i])
	end
	failed = limiter.load()
end
failed = failed or limiter.read()
if failed then
	return failed
end
local me, count = ARGV[1], tonumber(ARGV[7])
if limiter.own() and ARGV[8 + 4 * count] ~= tostring(limiter.rate()) then
	limiter.count() -- another client may have set the rate, and could not count the permits of this one
end
local now, micros = limiter.now()

local function permits(i) return tonumber(ARGV[4 + 4 * i]) end

local function since(i) return now - ARGV[5 + 4 * i] end

-- The turn of another client, which no request overtakes that has not waited for longer.
local turn = not limiter.own() and call('GET', KEYS[6])
local left = turn and call('PTTL', KEYS[6]) - ARGV[2] -- ms until it comes again
local at, client = string.match(turn or '', '^(%d+) (.*)$')
if client and left + ARGV[2] < 0 then
	client = nil -- without an expiry it is not redlatch's
end
local function blocked(i) return client and client ~= me and tonumber(at) < since(i) end

local rest = 0 -- permits of the requests that are not served
for i = 1, count do
	rest = rest + permits(i)
end

-- A pause costs a small part of the rate. Without one a fast limiter would get a request for each permit.
local pause = math.min(limiter.interval() * 2.5, 5000)

local served, new, added, wait, try_again = 0, 0, {}, 0, nil
for i = 1, count do
	local n, entry = permits(i), ARGV[6 + 4 * i]
	local function known() return call('ZSCORE', limiter.entries(), entry) end
	local again = ARGV[7 + 4 * i] == '1' and known()
	if not again and n > limiter.rate() then
		break
	end
	if not again and blocked(i) then
		again = known() -- a request that comes twice
		if not again then
			-- Just after the client with the turn, unless that is late.
			wait, try_again = math.max(left, 0) * 1000 + (left > -20 and 1000 or 20000), true
			break
		end
	elseif not again then
		local due, all = limiter.due(n, rest)
		if due <= now then
			limiter.take(n)
			new = new + 1
		elseif not known() then
			local function until_then(ms) return (ms - now) * 1000 - micros end
			wait, try_again = math.max(until_then(due), math.min(pause, all and until_then(all) or pause)), true
			break
		end
	end
	rest = rest - n
	-- The caller of a request that has run before will only now learn of its permits, and use them.
	added[2 * i - 1], added[2 * i] = now, entry
	served = i
end

if served > 0 then
	limiter.add(added, new)
end
failed = limiter.store()
if failed then
	for i = 2, 2 * served, 2 do
		call('ZREM', limiter.entries(), added[i])
	end
	return failed
end

if try_again and me ~= '' and not limiter.own() and not blocked(served + 1) then
	local soon = math.min(math.ceil(wait / 1000), 5000) -- a client that lives looks every 5 s at least
	call('SET', KEYS[6], string.format('%.0f ', since(served + 1)) .. me, 'PX', soon + ARGV[2])
elseif not try_again and client == me then
	call('DEL', KEYS[6])
end
return {served, math.ceil(wait), limiter.free(), limiter.rate(), limiter.interval()}

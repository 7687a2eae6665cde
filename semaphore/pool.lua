-- What the scripts of both semaphores share; it stands before each of them that
-- writes.
--
-- A semaphore is a string with the number of permits that are free. Redisson knows no
-- more of it. Beside it are keys of ours, all of which expire:
--
-- The ticket remembers the last request of a lane, and its reply. A lane is of one
-- client and has one request under way at a time; its numbers grow. So a request takes
-- effect once, however often it is delivered, and it can be called off.
--
-- The line has the clients whose first request has waited for long, with the time
-- since when, and the signs of life of these clients. Nobody of ours is served before
-- the first of them who is alive. It is empty unless somebody would starve.
--
-- KEYS[1]  permits
-- KEYS[2]  ticket
-- KEYS[3]  line, KEYS[4] signs of life
-- ARGV[1]  number of the request
-- ARGV[2]  for how long the ticket is kept, in ms
-- ARGV[3]  command that publishes
-- ARGV[4]  channel

local pool = {}

local permits, ticket, line, alive = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

-- The most permits there can be: what an int of Java holds.
pool.most = 2147483647

local clock

-- The server's time in ms: the same for the whole script.
function pool.now()
	if not clock then
		local time = redis.call('TIME')
		clock = time[1] * 1000 + math.floor(time[2] / 1000)
	end
	return clock
end

-- The reply of this request if it has run before; nil if it has not. One that comes
-- after a later request of its lane has no answer that anybody waits for.
function pool.before()
	local last = redis.call('GET', ticket)
	if not last then
		return nil
	end
	local reply = {}
	for n in string.gmatch(last, '%-?%d+') do
		reply[#reply + 1] = tonumber(n)
	end
	local number = table.remove(reply, 1)
	if number < tonumber(ARGV[1]) then
		return nil
	end
	return number == tonumber(ARGV[1]) and reply or {}
end

-- Keeps the reply of this request. It comes before what the request does: a user who
-- may not do one of the two must not do half of it.
function pool.note(reply)
	redis.call('SET', ticket, ARGV[1] .. ' ' .. table.concat(reply, ' '), 'PX', ARGV[2])
	return reply
end

-- Changes the number of free permits and returns it. What else the request does comes
-- after it: a user who may not do this has done nothing, and the request has not run.
function pool.change(by)
	local free = redis.pcall('INCRBY', permits, by)
	if type(free) ~= 'number' then
		redis.call('SET', ticket, ARGV[1] - 1, 'PX', ARGV[2])
		redis.call('INCRBY', permits, by) -- raises the error
	end
	return free
end

-- Stands before all that a script writes which gives something back: of a server out of
-- memory only the first write of a script is refused, if it may take memory. This one
-- takes none, and changes nothing.
function pool.begin_return()
	redis.pcall('ZREM', line, '')
end

-- How many permits are free, nil if there is no semaphore.
function pool.free()
	local value = redis.call('GET', permits)
	if value and not tonumber(value) then
		redis.call('INCRBY', permits, 0) -- raises the error that says so
	end
	return value and tonumber(value) or nil
end

-- Publishes a number of permits and returns how many were told. There is nothing to
-- tell unless somebody can be served.
function pool.tell(n)
	if n <= 0 then
		return 0
	end
	-- pcall: who may not publish has given them back all the same, and waiters poll.
	local told = redis.pcall(ARGV[3], ARGV[4], n)
	return type(told) == 'number' and told or 0
end

-- Makes a key of ours last for a while from now.
local function keep(key, life)
	if redis.call('PTTL', key) < tonumber(life) then
		redis.call('PEXPIRE', key, life)
	end
end

-- Takes a client out of the line, and returns whether it was in it.
function pool.step_out(client)
	redis.call('ZREM', alive, client)
	return redis.call('ZREM', line, client) == 1
end

-- Who is first in the line and alive, nil if nobody is; since when it has waited; and
-- for how many ms it will be taken to be alive.
local function first()
	while true do
		local client, since = unpack(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES'))
		if not client then
			return nil
		end
		local left = tonumber(redis.call('ZSCORE', alive, client) or 0) - pool.now()
		if left > 0 then
			return client, tonumber(since), left
		end
		pool.step_out(client)
	end
end

-- Serves requests of one client, that wait behind one another, in their order and as
-- far as free permits go, but none before an older one in the line. It changes nothing
-- but the line. ARGV has from at on: the client, '' if it does not wait; after how many
-- ms of waiting it goes into the line; for how many ms after an attempt it is taken to
-- be alive; how many requests there are; and for each of them, in width arguments, the
-- permits, and the ms it has waited.
-- Returns a table: n, how many were served; taken, permits in all; again, after how
-- many ms others may have left the line, or -1; placed, 1 if the next stands in line
-- now, else 0; left, whether the client has left the line, so that others can pass.
function pool.serve(free, at, width)
	local me, count = ARGV[at], tonumber(ARGV[at + 3])
	local served = {n = 0, taken = 0, again = -1, placed = 0, left = false}
	local head, since, left = first()
	while served.n < count do
		local n = tonumber(ARGV[at + 4 + served.n * width])
		local waited = tonumber(ARGV[at + 5 + served.n * width])
		if head and head ~= me and since < pool.now() - waited then
			served.again = left
			break
		end
		if served.taken + n > (free or 0) then
			break
		end
		if head and pool.step_out(me) then
			served.left = true
			head, since, left = first()
		end
		served.n, served.taken = served.n + 1, served.taken + n
	end
	if me ~= '' and served.n < count then
		local waited = tonumber(ARGV[at + 5 + served.n * width])
		if not free then
			-- Where there are no permits at all nobody is before anybody else.
			pool.step_out(me)
		elseif waited >= tonumber(ARGV[at + 1]) then
			local life = ARGV[at + 2]
			keep(line, life) -- first of all: who may not, must not make a key that stays
			keep(alive, life)
			redis.call('ZADD', line, 'NX', pool.now() - waited, me)
			redis.call('ZADD', alive, pool.now() + life, me)
			keep(line, life)
			keep(alive, life)
			served.placed = 1
		end
	end
	return served
end

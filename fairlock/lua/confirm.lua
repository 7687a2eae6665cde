-- Tells whether a claim stands that a process passes on between its own waiters, and which
-- of them come next. It can be repeated.
-- KEYS[1..5]    as acquire.lua
-- ARGV[1..5]    as acquire.lua
-- ARGV[6]       claim
-- ARGV[7]       lease in ms: the claim lasts at least that long
-- ARGV[8]       n
-- ARGV[9..8+n]  claims that leave the queue, because their waiters have had the lock
-- ARGV[9+n..]   claims that wait, in the order of their process
-- Reply: 1 if the claim holds the lock, else 0; and the number k: the first k claims that
-- wait are the first k of the queue, in this order. If the lock is not held, k is 0.

local q = positions.open(1, ARGV[1], ARGV[2])
local held = redis.call('HEXISTS', KEYS[1], ARGV[6])
if held == 1 then
	positions.extend(q, ARGV[7])
end
local had = 8 + ARGV[8] -- index of the last claim that leaves
if had > 8 then
	positions.leave(q, unpack(ARGV, 9, had))
end
positions.refresh(q, {})
local queue, first = redis.call('LRANGE', KEYS[2], 0, #ARGV - had), 0
while held == 1 and had + first < #ARGV and queue[first + 1] == ARGV[had + first + 1] do
	first = first + 1
end
positions.close(q, ARGV[3], ARGV[4], ARGV[5])
return {held, first}

-- Removes the fencing counter of a lock that nobody holds.
-- KEYS[1]  lock hash
-- KEYS[2]  fencing counter
-- Reply: 1 if there was one and it is gone, else 0.

if redis.call('EXISTS', KEYS[1]) == 1 then
	return 0
end
return redis.call('DEL', KEYS[2])

-- Gives values of a group back. It can be repeated.
-- KEYS[1]    hash of the group
-- ARGV[1]    claim
-- ARGV[2]    command that publishes
-- ARGV[3]    channel, which is no key: ACL rules have channels of their own
-- ARGV[3+i]  value
-- Reply: free, 2 plus the number of receivers; 0 if the claim did not have all of them.

local values = {unpack(ARGV, 4)}
local stood = group.stands(KEYS[1], ARGV[1], values)
local receivers = group.leave(KEYS[1], ARGV[1], values) and group.publish(ARGV[2], ARGV[3]) or 0
return stood and 2 + receivers or 0

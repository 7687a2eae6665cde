-- What scripts find on the server.
std = "lua51"
read_globals = {"redis", "KEYS", "ARGV"}
max_line_length = 120

-- Common functions that Go puts before each script of a package.
files["rlock/lua/*.lua"] = {read_globals = {"kinds", "tokens"}}
files["election/lua/*.lua"] = {read_globals = {"tokens"}}
files["fairlock/lua/*.lua"] = {read_globals = {"kinds", "positions"}}
files["grouplock/lua/*.lua"] = {read_globals = {"kinds", "group"}}
files["grouplock/lua/group.lua"] = {ignore = {"2..", "311"}}
files["rwlock/lua/*.lua"] = {read_globals = {"kinds", "holds"}}
files["internal/engine/lua/kinds.lua"] = {ignore = {"2..", "311"}}
files["internal/engine/lua/tokens.lua"] = {ignore = {"2..", "311"}}
files["countdown/lua/*.lua"] = {read_globals = {"latch"}}
files["fairlock/lua/positions.lua"] = {ignore = {"2..", "311"}}
files["rwlock/lua/holds.lua"] = {ignore = {"2..", "311"}}
files["ratelimit/lua/*.lua"] = {read_globals = {"limiter"}}
files["semaphore/lua/*.lua"] = {read_globals = {"pool", "permits"}}
files["semaphore/lua/*_usual.lua"] = {read_globals = {"call", "try", "time", "usual", "change", "undo", "publish"}}
files["semaphore/lua/idle*.lua"] = {globals = {"ARGV", "KEYS"}, read_globals = {"operation", "keep"}}
files["ratelimit/lua/limiter.lua"] = {ignore = {"2..", "311"}}
files["semaphore/lua/idle.lua"] = {ignore = {"2..", "311"}}
files["semaphore/lua/usual.lua"] = {ignore = {"2..", "311"}}
files["semaphore/lua/pool.lua"] = {ignore = {"2..", "311"}}
files["semaphore/lua/permits.lua"] = {ignore = {"2..", "311"}}
files["countdown/lua/count.lua"] = {ignore = {"2..", "311"}}
files["internal/lockstep/clock.lua"] = {ignore = {"2..", "311"}}

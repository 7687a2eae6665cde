-- What scripts find on the server.
std = "lua51"
read_globals = {"redis", "KEYS", "ARGV"}
max_line_length = 120

-- Common functions that Go puts before each script of a package.
files["fairlock/*.lua"] = {read_globals = {"places"}}
files["rwlock/*.lua"] = {read_globals = {"holds"}}
files["countdown/*.lua"] = {read_globals = {"latch"}}
files["fairlock/testdata/*.lua"] = {read_globals = {"server", "look"}, ignore = {"2..", "311"}, globals = {"redis"}}
files["fairlock/places.lua"] = {ignore = {"2..", "311"}}
files["rwlock/holds.lua"] = {ignore = {"2..", "311"}}
files["semaphore/*.lua"] = {read_globals = {"pool", "permits"}}
files["semaphore/testdata/*.lua"] = {read_globals = {"server", "look"}, ignore = {"2..", "311"}, globals = {"redis"}}
files["semaphore/pool.lua"] = {ignore = {"2..", "311"}}
files["semaphore/permits.lua"] = {ignore = {"2..", "311"}}
files["countdown/count.lua"] = {ignore = {"2..", "311"}}

package ratelimit_test

// workers has no entries: no test stops a process on this system.
var workers map[string]func(args []string) error

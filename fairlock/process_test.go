package fairlock_test

var workers = map[string]func(args []string) error{}

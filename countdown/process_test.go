package countdown_test

import "github.com/redis/rueidis"

type redisMessage = rueidis.PubSubMessage

var workers = map[string]func(args []string) error{}

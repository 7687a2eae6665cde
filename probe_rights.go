package redlatch

import (
	"strings"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// use is a command as objects of a kind use it.
type use struct {
	Right
	kind string
}

// words returns the command as probe.lua checks it: a key or channel follows it.
func (u use) words() []string {
	switch {
	case u.On == "":
		return strings.Fields(u.Command)
	case strings.HasPrefix(u.Command, "EVAL"):
		return []string{u.Command, "script", "1", u.On}
	default:
		return []string{u.Command, u.On}
	}
}

// usesOf returns the commands that the objects of a key send, directly or from scripts, in
// the order of their kinds. Those of fair and read-write locks add to those of kind "", and
// those of elections to those of fair locks.
func usesOf(key, client string, cluster, sharded bool) (uses []use) {
	owner, _ := lock.NewOwner(client, 0) // not a real owner
	general, channel := "PING", "PUBLISH,SUBSCRIBE,UNSUBSCRIBE"
	if cluster {
		general += ",CLUSTER SLOTS,CLUSTER SHARDS,ASKING"
	}
	if sharded {
		general += ",PUBSUB SHARDNUMSUB"
		channel = "SPUBLISH,SSUBSCRIBE,SUNSUBSCRIBE"
	}
	// One slot stands for all.
	run, done := wire.OnceRun(key, "slot"), wire.OnceDone(key, "slot")
	const queue = "ZRANGE,ZSCORE,ZCOUNT,ZADD,ZREM,PTTL,PEXPIRE,DEL"
	for _, row := range []struct{ kind, on, commands string }{
		{"", key, "EVALSHA,EVAL,EXISTS,HSET,HEXISTS,HGET,HDEL,HLEN,PEXPIRE,PTTL,DEL"},
		{"", wire.FencingToken(key), "INCR,GET,DEL"},
		{"", "", general},
		{"", wire.LockChannel(key), channel},

		{KindFair, wire.FairQueue(key), "EXISTS,LLEN,LINDEX,LPOS,LRANGE,RPUSH,LPUSH,LPOP,LREM,PTTL,PEXPIRE,PERSIST,DEL"},
		{KindFair, wire.FairTimeouts(key), "EXISTS,ZCARD,ZSCORE,ZMSCORE,ZADD,ZREM,PEXPIRE,PERSIST,DEL"},
		{KindFair, wire.FairAlive(key), "EXISTS,ZCARD,ZRANGE,ZSCORE,ZMSCORE,ZADD,ZREM,PEXPIRE,DEL"},
		{KindFair, wire.FairOrder(key), "EXISTS,ZRANGE,ZRANGEBYSCORE,ZSCORE,ZADD,ZREM,PEXPIRE,DEL"},
		{KindFair, "", "TIME"},
		{KindFair, wire.FairChannel(key, owner), channel},

		{KindReadWrite, key, "HMGET,HGETALL,HRANDFIELD"},
		{KindReadWrite, wire.ReadHoldTimeout(key, owner.String(), 1), "SET,PTTL,PEXPIRE,DEL"},
		{KindReadWrite, wire.WriterWaits(key), "EXISTS,PTTL,SADD,SREM,PEXPIRE,DEL"},
		{KindReadWrite, wire.RWChannel(key), channel},

		{KindSemaphore, key, "EXISTS,GET,SET,INCRBY,PTTL,DEL"},
		{KindSemaphore, wire.SemaphoreRequests(key, client), "EXISTS,HGET,HSET,HDEL,PEXPIRE"},
		{KindSemaphore, wire.SemaphoreCreated(key), "GET,SET"},
		{KindSemaphore, wire.SemaphoreWaiting(key), "EXISTS," + queue},
		{KindSemaphore, wire.SemaphoreAlive(key), queue},
		{KindSemaphore, wire.PermitTimeouts(key), "ZRANGE,ZRANGEBYSCORE,ZSCORE,ZCARD,ZCOUNT,ZADD,ZREM,PEXPIRE,PERSIST,DEL"},
		{KindSemaphore, "", "TIME"},
		{KindSemaphore, wire.SemaphoreChannel(key), channel},

		{KindLatch, key, "GET,SET,DECRBY"},
		{KindLatch, wire.LatchRound(key), "GET,SET,DEL"},
		{KindLatch, wire.LatchChannel(key), channel},

		{KindPlain, key, "SET,GET,PTTL,PEXPIRE,DEL"},
		{KindPlain, wire.PlainChannel(key), channel},

		{KindElection, wire.ElectionTerm(key), "HGET,HMGET,HSET,HINCRBY"},
		{KindElection, wire.ElectionChannel(key), channel},

		{KindOnce, run, "EVALSHA,EVAL,EXISTS,HSET,HEXISTS,HDEL,PEXPIRE,PTTL,DEL"},
		{KindOnce, wire.LockChannel(run), channel},
		{KindOnce, done, "EXISTS,SET,DEL"},
	} {
		if row.kind == KindLatch && wire.CheckLatchName(key, cluster, sharded) != nil {
			continue // no latch has this name
		}
		for command := range strings.SplitSeq(row.commands, ",") {
			uses = append(uses, use{Right{command, row.on}, row.kind})
		}
	}
	return uses
}

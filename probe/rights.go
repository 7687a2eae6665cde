package probe

import (
	"slices"
	"strings"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// use is a command as objects of a kind use it.
type use struct {
	Right
	kind string
	// pattern matches On and the keys or channels for which it stands.
	pattern string
}

// verdict is what a server says about a use, as in the reply of probe.lua.
type verdict int64

const (
	usePermitted   verdict = 1
	useRefused     verdict = 0
	useUnsupported verdict = -1
	useUnknown     verdict = -2
)

// moreArguments is the least number of arguments that a command takes after the key or channel.
var moreArguments = map[string]int{
	"HDEL": 1, "HEXISTS": 1, "HGET": 1, "HINCRBY": 2, "HMGET": 1, "HSET": 2, "HSETNX": 2,
	"LINDEX": 1, "LPUSH": 1, "LRANGE": 2, "LREM": 2, "RPUSH": 1,
	"SADD": 1, "SREM": 1,
	"ZADD": 2, "ZCOUNT": 2, "ZMSCORE": 1, "ZRANGE": 2, "ZRANGEBYSCORE": 2, "ZREM": 1, "ZSCORE": 1,
	"ZREMRANGEBYRANK": 2, "ZREMRANGEBYSCORE": 2,
	"DECRBY": 1, "INCRBY": 1, "PEXPIRE": 1, "SET": 1,
	"PUBLISH": 1, "SPUBLISH": 1,
}

// words returns the command as probe.lua checks it. Redis 8 checks only a command that has enough
// arguments; their values do not matter.
func (u use) words() []string {
	if u.On == "" {
		return strings.Fields(u.Command)
	}
	if strings.HasPrefix(u.Command, "EVAL") {
		return []string{u.Command, "script", "1", u.On}
	}
	return append([]string{u.Command, u.On}, slices.Repeat([]string{"0"}, moreArguments[u.Command])...)
}

// usesOf returns the commands that the objects of a key send, directly or from scripts, in
// the order of their kinds. The commands of fair and read-write locks add to the commands of kind "", and
// the commands of elections to the commands of fair locks.
func usesOf(key, client string, cluster, sharded bool) (uses []use) {
	owner, _ := lock.NewOwner(client, 0) // not a real owner
	general := "PING"
	channel := "PUBLISH,SUBSCRIBE,UNSUBSCRIBE"
	if cluster {
		general += ",CLUSTER SLOTS,CLUSTER SHARDS,ASKING"
	}
	if sharded {
		general += ",PUBSUB SHARDNUMSUB"
		channel = "SPUBLISH,SSUBSCRIBE,SUNSUBSCRIBE"
	}

	// One slot stands for all.
	run := wire.OnceRun(key, "slot")
	done := wire.OnceDone(key, "slot")
	const queue = "ZRANGE,ZSCORE,ZCOUNT,ZADD,ZREM,PTTL,PEXPIRE,DEL"
	const number = "GET,SET,INCRBY,PEXPIRE,PERSIST,DEL"
	const entries = "ZRANGE,ZRANGEBYSCORE,ZSCORE,ZCARD,ZCOUNT,ZADD,ZREM,ZREMRANGEBYRANK,ZREMRANGEBYSCORE,PEXPIRE,PERSIST,DEL"
	for _, row := range []struct{ kind, on, commands string }{
		{"", key, "EVALSHA,EVAL,EXISTS,HSET,HEXISTS,HGET,HDEL,HLEN,HKEYS,HRANDFIELD,PEXPIRE,PTTL,DEL"},
		{"", wire.FencingToken(key), "INCR,INCRBY,GET,DEL"},
		{"", "", general},
		{"", wire.LockChannel(key), channel},

		{KindFair, wire.FairQueue(key), "EXISTS,LLEN,LINDEX,LRANGE,RPUSH,LPUSH,LPOP,LREM,PTTL,PEXPIRE,PERSIST,DEL"},
		{KindFair, wire.FairTimeouts(key), "EXISTS,ZCARD,ZSCORE,ZMSCORE,ZADD,ZREM,PEXPIRE,PERSIST,DEL"},
		{KindFair, wire.FairAlive(key), "EXISTS,ZCARD,ZRANGE,ZSCORE,ZMSCORE,ZADD,ZREM,PEXPIRE,DEL"},
		{KindFair, wire.FairOrder(key), "EXISTS,ZRANGE,ZRANGEBYSCORE,ZSCORE,ZADD,ZREM,PEXPIRE,DEL"},
		{KindFair, "", "TIME"},
		{KindFair, wire.FairChannel(key, owner), channel},

		{KindReadWrite, key, "HMGET,HGETALL"},
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
		{KindLatch, wire.LatchRound(key) + ":" + client, "GET,SET"}, // the replies to requests
		{KindLatch, wire.LatchChannel(key), channel},

		{KindPlain, key, "SET,GET,PTTL,PEXPIRE,DEL"},
		{KindPlain, wire.PlainChannel(key), channel},

		{KindElection, wire.ElectionTerm(key), "HGET,HMGET,HSET,HINCRBY"},
		{KindElection, wire.ElectionChannel(key), channel},

		{KindOnce, run, "EVALSHA,EVAL,HSET,HEXISTS,HGET,HDEL,HLEN,HKEYS,HRANDFIELD,PEXPIRE,PTTL,DEL"},
		{KindOnce, wire.LockChannel(run), channel},
		{KindOnce, done, "EVALSHA,EVAL,GET,SET,PTTL,PEXPIRE,DEL"},

		{KindRate, key, "HGET,HMGET,HSET,HSETNX,PTTL,PEXPIRE,PERSIST,DEL"},
		{KindRate, wire.RateValue(key), number},
		{KindRate, wire.RateValueOf(key, client), number},
		{KindRate, wire.RatePermits(key), entries},
		{KindRate, wire.RatePermitsOf(key, client), entries},
		{KindRate, wire.RateTurn(key), "GET,SET,PTTL,DEL"},
		{KindRate, wire.RateReply(key, client), "GET,SET"},
		{KindRate, "", "TIME"},
		{KindRate, wire.RateChannel(key), channel},

		{KindGroup, "", "TIME"},
	} {
		if row.kind == KindLatch && wire.CheckLatchName(key, cluster, sharded) != nil {
			continue // no latch has this name
		}
		pattern := row.on
		if before, _, found := strings.Cut(row.on, ":"+client); found {
			pattern = before + ":*"
		}
		if row.kind == KindOnce {
			pattern = strings.TrimSuffix(pattern, "slot") + "*"
		}
		for command := range strings.SplitSeq(row.commands, ",") {
			uses = append(uses, use{Right{command, row.on}, row.kind, pattern})
		}
	}
	return uses
}

// kindAccess is the kind of the uses that tell whether the user has access to a key at all: no
// object needs them, because they repeat what a script with that key needs.
const kindAccess = "access"

// accessOf returns a use of that kind for each key.
func accessOf(uses []use) (all []use) {
	seen := map[string]bool{}
	for _, u := range uses {
		if u.On != "" && !u.isChannel() && !seen[u.On] {
			seen[u.On] = true
			all = append(all, use{Right{"EVALSHA", u.On}, kindAccess, u.pattern})
		}
	}
	return all
}

// isChannel reports whether the command applies to a channel.
func (u use) isChannel() bool {
	return strings.HasSuffix(u.Command, "PUBLISH") || strings.HasSuffix(u.Command, "SUBSCRIBE")
}

// rulesOf returns the ACL rules that permit each of the uses that the server refuses, by its index.
// They omit what other uses show to be permitted, because ACL SETUSER refuses a pattern for a user
// with all keys or channels.
func rulesOf(uses []use, verdicts []verdict) map[int][]string {
	commands := map[string]bool{}
	patterns := map[string]bool{}
	unsubscribes := false
	for i, u := range uses {
		if verdicts[i] != usePermitted {
			continue
		}
		commands[u.commandRule()] = true
		if strings.HasSuffix(u.Command, "UNSUBSCRIBE") {
			unsubscribes = true // on any channel
		} else if u.isChannel() || u.kind == kindAccess {
			patterns[u.patternRule()] = true
		}
	}

	rules := map[int][]string{}
	for i, u := range uses {
		if verdicts[i] != useRefused {
			continue
		}
		var add []string
		if !commands[u.commandRule()] {
			add = append(add, u.commandRule())
		}

		// A user without any command for channels may have access to all of them.
		if u.On != "" && !patterns[u.patternRule()] && (unsubscribes || !u.isChannel()) {
			add = append(add, u.patternRule())
		}
		if len(add) == 0 { // a selector permits the command for other keys
			add = append(add, u.commandRule())
		}
		rules[i] = add
	}

	return rules
}

// commandRule returns the ACL rule for the command.
func (u use) commandRule() string {
	return "+" + strings.ReplaceAll(strings.ToLower(u.Command), " ", "|")
}

// aclPattern returns an ACL pattern of a name. A pattern cannot contain spaces, and quotes and control
// characters would have to be quoted for redis-cli: any character may be in their places.
func aclPattern(name string) string {
	var out strings.Builder
	for _, c := range []byte(name) {
		if strings.IndexByte(`\?[]`, c) >= 0 {
			out.WriteByte('\\')
			out.WriteByte(c)
		} else if c <= ' ' || c == 0x7f || c == '"' || c == '\'' {
			out.WriteByte('?')
		} else {
			out.WriteByte(c)
		}
	}

	return out.String()
}

// patternRule returns the ACL rule for the key or channel.
func (u use) patternRule() string {
	if u.isChannel() {
		return "&" + aclPattern(u.pattern)
	}
	return "~" + aclPattern(u.pattern)
}

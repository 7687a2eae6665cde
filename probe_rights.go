package redlatch

import (
	"slices"
	"strings"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// use is a command as objects of a kind use it.
type use struct {
	Right
	words []string
	kind  string
}

// useList lists the commands of one kind.
type useList struct {
	kind string
	all  []use
}

// on adds commands on a key or channel.
func (u *useList) on(on string, commands ...string) {
	for _, command := range commands {
		words := []string{command, on}
		switch command {
		case "HSET", "LREM", "LRANGE", "ZADD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE":
			words = append(words, "1", "1")
		case "INCRBY", "DECRBY", "HEXISTS", "HGET", "HMGET", "HRANDFIELD", "HDEL", "PEXPIRE", "SET", "SADD", "SREM", "LINDEX", "LPOS", "LPUSH", "RPUSH", "ZREM", "ZSCORE",
			"PUBLISH", "SPUBLISH":
			words = append(words, "1")
		case "EVALSHA", "EVAL":
			words = []string{command, "script", "1", on}
		}
		u.all = append(u.all, use{Right{command, on}, words, u.kind})
	}
}

// bare adds commands without a key.
func (u *useList) bare(commands ...string) {
	for _, command := range commands {
		u.all = append(u.all, use{Right{Command: command}, strings.Fields(command), u.kind})
	}
}

// channel adds the commands on a channel.
func (u *useList) channel(sharded bool, channel string) {
	if sharded {
		u.on(channel, "SPUBLISH", "SSUBSCRIBE", "SUNSUBSCRIBE")
	} else {
		u.on(channel, "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE")
	}
}

// usesOf returns the commands that locks of package rlock other than plain ones send,
// directly or from scripts.
func (c *Client) usesOf(key string) []use {
	u := lockUses(key)
	u.bare("PING")
	if c.s.Cluster() {
		u.bare("CLUSTER SLOTS", "CLUSTER SHARDS", "ASKING")
	}
	u.channel(c.s.Sharded, wire.LockChannel(key))
	if c.s.Sharded {
		u.bare("PUBSUB SHARDNUMSUB")
	}
	return u.all
}

// otherUsesOf returns the additional commands of other kinds.
func (c *Client) otherUsesOf(key string) []use {
	owner, _ := lock.NewOwner(c.s.ID, 0) // not a real owner
	fair, rw, sc, plain := fairUses(key), rwUses(key, owner), semaphoreUses(key, c.s.ID), plainUses(key)
	fair.channel(c.s.Sharded, wire.FairChannel(key, owner))
	rw.channel(c.s.Sharded, wire.RWChannel(key))
	sc.channel(c.s.Sharded, wire.SemaphoreChannel(key))
	plain.channel(c.s.Sharded, wire.PlainChannel(key))
	return slices.Concat(fair.all, rw.all, sc.all, c.latchUsesOf(key), plain.all)
}

// latchUsesOf returns the commands of count-down latches, none if the name is invalid
// for them.
func (c *Client) latchUsesOf(key string) []use {
	if wire.CheckLatchName(key) != nil {
		return nil
	}
	u := latchUses(key)
	u.channel(c.s.Sharded, wire.LatchChannel(key))
	return u.all
}

// lockUses returns the commands of package rlock, without plain locks.
func lockUses(key string) *useList {
	u := &useList{}
	u.on(key, "EVALSHA", "EVAL", "EXISTS", "HSET", "HEXISTS", "HGET", "HLEN", "PEXPIRE", "PTTL", "DEL")
	u.on(wire.FencingToken(key), "INCR", "GET", "DEL")
	return u
}

// fairUses returns the additional commands of fair locks.
func fairUses(key string) *useList {
	u := &useList{kind: KindFair}
	u.on(wire.FairQueue(key), "EXISTS", "LLEN", "LINDEX", "LPOS", "LRANGE", "RPUSH", "LPUSH", "LPOP", "LREM", "PEXPIRE", "PERSIST", "DEL")
	u.on(wire.FairTimeouts(key), "EXISTS", "ZCARD", "ZSCORE", "ZADD", "ZREM", "PEXPIRE", "PERSIST", "DEL")
	u.on(wire.FairAlive(key), "EXISTS", "ZCARD", "ZSCORE", "ZRANGEBYSCORE", "ZADD", "ZREM", "PEXPIRE", "DEL")
	u.bare("TIME")
	return u
}

// rwUses returns the additional commands of read-write locks.
func rwUses(key string, owner lock.Owner) *useList {
	u := &useList{kind: KindReadWrite}
	u.on(key, "HMGET", "HGETALL", "HDEL", "HRANDFIELD")
	u.on(wire.ReadHoldTimeout(key, owner, 1), "SET", "PTTL", "PEXPIRE", "DEL")
	u.on(wire.WriterWaits(key), "EXISTS", "PTTL", "SADD", "SREM", "PEXPIRE", "DEL")
	return u
}

// semaphoreUses returns the commands of semaphores of either kind.
func semaphoreUses(key, client string) *useList {
	u := &useList{kind: KindSemaphore}
	u.on(key, "GET", "SET", "EXISTS", "INCRBY", "PTTL")
	u.on(wire.SemaphoreRequest(key, client, 1), "GET", "SET")
	for _, queue := range []string{wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key)} {
		u.on(queue, "ZRANGE", "ZSCORE", "ZADD", "ZREM", "PTTL", "PEXPIRE")
	}
	u.on(wire.PermitTimeouts(key), "ZRANGE", "ZRANGEBYSCORE", "ZSCORE", "ZCARD", "ZCOUNT", "ZADD", "ZREM", "PEXPIRE")
	u.bare("TIME")
	return u
}

// plainUses returns the commands of plain locks.
func plainUses(key string) *useList {
	u := &useList{kind: KindPlain}
	u.on(key, "SET", "GET", "PTTL", "PEXPIRE", "DEL")
	return u
}

// latchUses returns the commands of count-down latches.
func latchUses(key string) *useList {
	u := &useList{kind: KindLatch}
	u.on(key, "GET", "SET", "DECRBY")
	u.on(wire.LatchRound(key), "GET", "SET", "DEL")
	return u
}

package redlatch

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed probe.lua
var probeLua string

var probeScript = wire.NewScript(probeLua)

// Check names one of the things that Client.Probe looks at.
type Check string

// The checks of Client.Probe.
const (
	// CheckEviction: a server that runs out of memory may evict locks.
	CheckEviction Check = "eviction"
	// CheckVersion: the server is older than redlatch supports.
	CheckVersion Check = "version"
	// CheckClock: the server's clock is far from that of this machine.
	CheckClock Check = "clock"
	// CheckCommands: the server lacks a command, or the user may not use it, or
	// not on the keys and channels of a lock.
	CheckCommands Check = "commands"
)

// Finding is something about a server that locks will suffer from.
type Finding struct {
	Check   Check
	Addr    string // of the node
	Problem string
	Advice  string
	// Missing is, for CheckCommands, what the server does not know or allow, and
	// Kind is of the objects that need it: KindFair, KindReadWrite, KindSemaphore,
	// KindLatch, KindPlain, or "" for the other locks of package rlock, without which
	// fair locks and read-write locks do not work either.
	Missing []Right
	Kind    string
}

// Kinds of object that need other rights than most locks of package rlock: fair locks,
// read-write locks, semaphores of either kind, count-down latches, plain locks.
const (
	KindFair      = "fair"
	KindReadWrite = "read-write"
	KindSemaphore = "semaphore"
	KindLatch     = "count-down latch"
	KindPlain     = "plain"
)

// kinds are all kinds, "" for the other locks of package rlock, and objects what they are
// called.
var (
	kinds   = []string{"", KindFair, KindReadWrite, KindSemaphore, KindLatch, KindPlain}
	objects = map[string]string{
		KindFair: "fair locks", KindReadWrite: "read-write locks", KindSemaphore: "semaphores", KindLatch: "count-down latches",
		KindPlain: "plain locks",
	}
)

// Right is a command, and the key or channel it was to be used on, if any.
type Right struct{ Command, On string }

// String returns the command and the key or channel.
func (r Right) String() string { return strings.TrimSpace(r.Command + " " + r.On) }

// String describes the finding.
func (f Finding) String() string {
	return fmt.Sprintf("%s: %s: %s; %s", f.Addr, f.Check, f.Problem, f.Advice)
}

// Node is what a server says of itself. What it does not tell, or the user may
// not ask, is left at its zero value.
type Node struct {
	Addr    string
	Server  string // "redis" or "valkey"
	Version string
	Replica bool
	// EvictionPolicy is maxmemory-policy; it matters where MaxMemory, in bytes,
	// is not 0.
	EvictionPolicy string
	MaxMemory      int64
	// ClockOffset is the server's clock less that of this machine, as precise as
	// half of RoundTrip.
	ClockOffset time.Duration
	RoundTrip   time.Duration
	// RightsKnown says whether the server can tell what the user may do: Redis
	// and Valkey from 7.0.
	RightsKnown bool
}

// Report is what Client.Probe has found.
type Report struct {
	Nodes    []Node // by address
	Findings []Finding
}

// The oldest versions that are supported. A server of another name is not
// judged.
var oldest = map[string][2]int{"redis": {6, 2}, "valkey": {7, 2}}

// maxClockOffset is beyond what clocks that anybody looks after have. redlatch
// itself compares no clocks of different machines; Redisson does.
const maxClockOffset = time.Second

// Probe asks every node what it is and whether the locks of the given names can
// be used there by this client's user, and returns what it found. It looks at the
// rights that objects of any kind need; what all but most locks of package rlock need
// in addition are findings of their own (see Finding.Kind), which do not matter to
// who uses none. It changes nothing; without names it does not look at rights. It
// blocks for a few round trips, and not beyond ctx; nodes are asked at the same
// time. It returns an error that matches lock.ErrInvalid for a bad name, or the
// errors of nodes that did not answer, with what the others said; what a server
// refuses to tell is not an error.
//
// New, Open and Wrap do the same with a made-up name, for most locks of package
// rlock, and log the findings.
func (c *Client) Probe(ctx context.Context, names ...string) (Report, error) {
	if err := c.s.Err(); err != nil {
		return Report{}, err
	}
	if ctx == nil {
		return Report{}, fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	var uses []use
	for _, name := range names {
		key := c.s.MapName(name)
		if err := errors.Join(wire.CheckName(name), wire.CheckName(key)); err != nil {
			return Report{}, err
		}
		uses = append(uses, c.usesOf(key)...)
		uses = append(uses, c.otherUsesOf(key)...)
	}
	return c.probe(ctx, wire.Shared(ctx), uses)
}

// startupName is of a lock that nobody has: what the user may do with it tells
// something of what it may do with others.
const startupName = "redlatch-startup-check"

// startupPatience bounds the checks of a new client.
const startupPatience = 2 * time.Second

// checkAtStartup logs what Probe finds.
func (c *Client) checkAtStartup(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, startupPatience)
	defer cancel()
	key := c.s.MapName(startupName)
	if wire.CheckName(key) != nil {
		return // the first use of a lock will tell
	}
	uses := c.usesOf(key)
	report, err := c.probe(ctx, endless(ctx), uses)
	if err != nil {
		c.s.Logger.Warn("redlatch: startup check: not complete", "error", err)
	}
	ofKey := func(r Right) bool { return r.On == key }
	for _, f := range report.Findings {
		if len(f.Missing) > 0 && countFunc(f.Missing, ofKey) == countFunc(uses, func(u use) bool { return ofKey(u.Right) }) {
			// This user's locks have other names.
			f.Missing = slices.DeleteFunc(f.Missing, func(r Right) bool { return r.On != "" })
			if len(f.Missing) == 0 {
				continue
			}
			f.Problem = denied(f.Missing)
		}
		c.s.Logger.Warn("redlatch: startup check: "+f.Problem, "check", string(f.Check), "addr", f.Addr, "advice", f.Advice)
	}
}

func countFunc[T any](all []T, f func(T) bool) (n int) {
	for _, v := range all {
		if f(v) {
			n++
		}
	}
	return n
}

// use is a command as a lock of a kind uses it.
type use struct {
	Right
	words []string
	kind  string
}

// useList is what one kind of lock uses.
type useList struct {
	kind string
	all  []use
}

// on adds commands on a key or channel.
func (u *useList) on(on string, commands ...string) {
	for _, command := range commands {
		words := []string{command, on}
		switch command {
		case "HSET", "HINCRBY", "LREM", "LRANGE", "ZADD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE":
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

// channel adds what is done with a channel.
func (u *useList) channel(sharded bool, channel string) {
	if sharded {
		u.on(channel, "SPUBLISH", "SSUBSCRIBE", "SUNSUBSCRIBE")
	} else {
		u.on(channel, "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE")
	}
}

// usesOf returns what the locks of a key that are of package rlock send, from
// scripts and otherwise, but for plain ones.
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

// otherUsesOf returns what objects of other kinds send besides.
func (c *Client) otherUsesOf(key string) []use {
	owner, _ := lock.NewOwner(c.s.ID, 0) // who holds nothing
	fair, rw, sc, plain := fairUses(key), rwUses(key, owner), semaphoreUses(key, c.s.ID), plainUses(key)
	fair.channel(c.s.Sharded, wire.FairChannel(key, owner))
	rw.channel(c.s.Sharded, wire.RWChannel(key))
	sc.channel(c.s.Sharded, wire.SemaphoreChannel(key))
	plain.channel(c.s.Sharded, wire.PlainChannel(key))
	return slices.Concat(fair.all, rw.all, sc.all, c.latchUsesOf(key), plain.all)
}

// latchUsesOf returns what count-down latches send: nothing if none can have that
// name.
func (c *Client) latchUsesOf(key string) []use {
	if wire.CheckLatchName(key) != nil {
		return nil
	}
	u := latchUses(key)
	u.channel(c.s.Sharded, wire.LatchChannel(key))
	return u.all
}

// lockUses returns what scripts of package rlock do, but those of plain locks.
func lockUses(key string) *useList {
	u := &useList{}
	u.on(key, "EVALSHA", "EVAL", "EXISTS", "HSET", "HEXISTS", "HGET", "HINCRBY", "HDEL", "HLEN", "PEXPIRE", "PTTL", "DEL")
	u.on(wire.UnlockLatch(key, "id"), "GET", "SET", "DEL", "PTTL", "PEXPIRE")
	u.on(wire.FencingToken(key), "INCR", "GET", "DEL")
	return u
}

// fairUses returns what those of a fair lock do besides.
func fairUses(key string) *useList {
	u := &useList{kind: KindFair}
	u.on(wire.FairQueue(key), "EXISTS", "LLEN", "LINDEX", "LPOS", "LRANGE", "RPUSH", "LPUSH", "LPOP", "LREM", "PEXPIRE", "PERSIST", "DEL")
	u.on(wire.FairTimeouts(key), "EXISTS", "ZCARD", "ZSCORE", "ZADD", "ZREM", "PEXPIRE", "PERSIST", "DEL")
	u.on(wire.FairAlive(key), "EXISTS", "ZCARD", "ZSCORE", "ZRANGEBYSCORE", "ZADD", "ZREM", "PEXPIRE", "DEL")
	u.bare("TIME")
	return u
}

// rwUses returns what those of a read-write lock do besides.
func rwUses(key string, owner lock.Owner) *useList {
	u := &useList{kind: KindReadWrite}
	u.on(key, "HMGET", "HGETALL", "HKEYS", "HRANDFIELD")
	u.on(wire.ReadHoldTimeout(key, owner, 1), "SET", "PTTL", "PEXPIRE", "DEL")
	u.on(wire.WriterWaits(key), "EXISTS", "PTTL", "SADD", "SREM", "PEXPIRE", "DEL")
	return u
}

// semaphoreUses returns what those of semaphores of either kind do.
func semaphoreUses(key, client string) *useList {
	u := &useList{kind: KindSemaphore}
	u.on(key, "GET", "SET", "EXISTS", "INCRBY", "PTTL")
	u.on(wire.SemaphoreRequest(key, client, 1), "GET", "SET")
	for _, line := range []string{wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key)} {
		u.on(line, "ZRANGE", "ZSCORE", "ZADD", "ZREM", "PTTL", "PEXPIRE")
	}
	u.on(wire.PermitTimeouts(key), "ZRANGE", "ZRANGEBYSCORE", "ZSCORE", "ZCARD", "ZCOUNT", "ZADD", "ZREM", "PEXPIRE")
	u.bare("TIME")
	return u
}

// plainUses returns what those of a plain lock do.
func plainUses(key string) *useList {
	u := &useList{kind: KindPlain}
	u.on(key, "SET", "GET", "PTTL", "PEXPIRE", "DEL")
	return u
}

// latchUses returns what those of a count-down latch do.
func latchUses(key string) *useList {
	u := &useList{kind: KindLatch}
	u.on(key, "GET", "SET", "DECRBY")
	u.on(wire.LatchRound(key), "GET", "SET", "DEL")
	return u
}

// probe asks all nodes at once, in requests with a context of their own. A node that hangs
// is left behind when ctx ends.
func (c *Client) probe(ctx, request context.Context, uses []use) (Report, error) {
	type answer struct {
		node     Node
		findings []Finding
		err      error
	}
	nodes := c.conn.Nodes()
	answers := make(chan answer, len(nodes))
	for addr, conn := range nodes {
		go func() {
			var a answer
			a.node, a.findings, a.err = probeNode(request, addr, conn, uses)
			answers <- a
		}()
	}
	var r Report
	var errs []error
	for range nodes {
		select {
		case a := <-answers:
			r.Nodes = append(r.Nodes, a.node)
			r.Findings = append(r.Findings, a.findings...)
			errs = append(errs, a.err)
			continue
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("redlatch: probe: %w", context.Cause(ctx)))
		}
		break
	}
	slices.SortFunc(r.Nodes, func(a, b Node) int { return strings.Compare(a.Addr, b.Addr) })
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return strings.Compare(a.Addr, b.Addr) })
	return r, errors.Join(errs...)
}

func probeNode(ctx context.Context, addr string, conn rueidis.Client, uses []use) (Node, []Finding, error) {
	n := Node{Addr: addr}
	info, err := conn.Do(ctx, conn.B().Info().Build()).ToString()
	if err != nil && !forbidden(err) {
		return n, nil, fmt.Errorf("redlatch: probe %s: %w", addr, err)
	}
	n.readInfo(info)

	var args []string
	for _, u := range uses {
		args = append(append(args, strconv.Itoa(len(u.words))), u.words...)
	}
	asked := time.Now()
	answer, err := probeScript.Exec(ctx, conn, nil, args).AsIntSlice()
	n.RoundTrip = time.Since(asked)
	var found []Finding
	lacks := func(kind, problem, advice string, missing ...Right) {
		if len(missing) == 0 {
			return
		}
		if kind != "" {
			problem = "for " + objects[kind] + ": " + problem
		}
		found = append(found, Finding{Check: CheckCommands, Addr: addr, Problem: problem, Advice: advice, Missing: missing, Kind: kind})
	}
	switch {
	case forbidden(err):
		err = nil
		lacks("", "this user may not run scripts", "allow this user the category @scripting, on a server that has it",
			Right{Command: "EVALSHA"}, Right{Command: "EVAL"})
	case err == nil && len(answer) < 3:
		err = fmt.Errorf("redlatch: probe %s: the answer has %d parts", addr, len(answer))
	case err != nil:
		err = fmt.Errorf("redlatch: probe %s: %w", addr, err)
	default:
		if answer[0] != 0 {
			n.ClockOffset = time.UnixMicro(answer[0]*1e6 + answer[1]).Sub(asked.Add(n.RoundTrip / 2))
		}
		n.RightsKnown = answer[2] == 1
		unknown, forbids := map[string][]Right{}, map[string][]Right{}
		for _, number := range answer[3:] {
			missing := forbids
			if number < 0 {
				missing, number = unknown, -number
			}
			u := uses[number-1]
			missing[u.kind] = append(missing[u.kind], u.Right)
		}
		for _, kind := range kinds {
			lacks(kind, "the server does not know "+joined(unknown[kind]), "use a server that has these commands, and does not rename them", unknown[kind]...)
			lacks(kind, denied(forbids[kind]), "allow the user these commands, keys and channels (ACL SETUSER)", forbids[kind]...)
		}
	}
	return n, append(found, n.findings()...), err
}

func denied(rights []Right) string { return "this user may not " + joined(rights) }

func joined(rights []Right) string {
	words := make([]string, len(rights))
	for i, r := range rights {
		words[i] = r.String()
	}
	return strings.Join(words, ", ")
}

// findings judges what the server says of itself.
func (n *Node) findings() (all []Finding) {
	find := func(check Check, problem, advice string) {
		all = append(all, Finding{Check: check, Addr: n.Addr, Problem: problem, Advice: advice})
	}
	if least, judged := oldest[n.Server]; judged && olderThan(n.Version, least) {
		find(CheckVersion, fmt.Sprintf("%s %s is older than %d.%d, the oldest that is supported", n.Server, n.Version, least[0], least[1]),
			"upgrade the server")
	}
	if n.MaxMemory > 0 && n.EvictionPolicy != "noeviction" && n.EvictionPolicy != "" && !n.Replica {
		find(CheckEviction, fmt.Sprintf("with maxmemory-policy %s the server may evict locks that are held", n.EvictionPolicy),
			"set maxmemory-policy to noeviction, or keep locks on a server of their own")
	}
	if off := n.ClockOffset.Abs() - n.RoundTrip/2; off > maxClockOffset {
		find(CheckClock, fmt.Sprintf("the server's clock is %v off that of this machine", n.ClockOffset.Round(time.Millisecond)),
			"synchronise the clocks: Redisson's fair locks and permits compare them")
	}
	return all
}

// forbidden reports whether err is the server's refusal of a command for good.
func forbidden(err error) bool {
	reply, isReply := rueidis.IsRedisErr(err)
	return isReply && (strings.HasPrefix(reply.Error(), "NOPERM") || strings.HasPrefix(reply.Error(), "unknown command"))
}

// readInfo reads the reply of INFO.
func (n *Node) readInfo(info string) {
	fields := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	n.Server, n.Version = "redis", fields["redis_version"]
	if name := fields["server_name"]; name != "" {
		n.Server = name
		if v := fields[name+"_version"]; v != "" {
			n.Version = v
		}
	}
	if n.Version == "" {
		n.Server = ""
	}
	n.Replica = fields["role"] == "slave"
	n.EvictionPolicy = fields["maxmemory_policy"]
	n.MaxMemory, _ = strconv.ParseInt(fields["maxmemory"], 10, 64)
}

func olderThan(version string, least [2]int) bool {
	var major, minor int
	if n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor); n < 2 {
		return false
	}
	return major < least[0] || major == least[0] && minor < least[1]
}

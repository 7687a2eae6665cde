package redlatch

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
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
	// Missing is, for CheckCommands, the commands with the key or channel that
	// they were to be used on.
	Missing []string
}

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
// be used there by this client's user, and returns what it found. It changes
// nothing. It blocks for a few round trips; nodes are asked concurrently. It
// returns an error that matches lock.ErrInvalid for a bad name, or the error of
// a connection; what a server refuses to tell is not an error.
//
// New, Open and Wrap do the same with a made-up name, and log the findings.
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
	}
	return c.probe(ctx, uses)
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
	report, err := c.probe(ctx, c.usesOf(key))
	if err != nil {
		c.s.Logger.Warn("redlatch: startup check: not complete", "error", err)
	}
	for _, f := range report.Findings {
		if f.Check == CheckCommands && slices.Contains(f.Missing, "EXISTS "+key) {
			continue // this user's locks have other names
		}
		c.s.Logger.Warn("redlatch: startup check: "+f.Problem, "check", string(f.Check), "addr", f.Addr, "advice", f.Advice)
	}
}

// use is a command as a lock uses it.
type use struct {
	words []string
	on    string // the key or channel, "" if none
}

// usesOf returns what the locks of a key send, from scripts and otherwise.
func (c *Client) usesOf(key string) []use {
	ticket, token, channel := wire.UnlockLatch(key, "id"), wire.FencingToken(key), wire.LockChannel(key)
	var all []use
	add := func(on string, commands ...string) {
		for _, command := range commands {
			words := []string{command, on}
			switch command {
			case "HSET", "HINCRBY":
				words = append(words, "field", "1")
			case "HEXISTS", "HGET", "HDEL":
				words = append(words, "field")
			case "PEXPIRE", "SET", "PUBLISH", "SPUBLISH":
				words = append(words, "1")
			case "EVALSHA", "EVAL":
				words = []string{command, "script", "1", on}
			}
			all = append(all, use{words, on})
		}
	}
	add(key, "EVALSHA", "EVAL", "EXISTS", "HSET", "HEXISTS", "HGET", "HINCRBY", "HDEL", "HLEN", "PEXPIRE", "PTTL", "DEL")
	add(ticket, "GET", "SET", "DEL")
	add(token, "INCR", "GET", "DEL")
	if c.s.Sharded {
		add(channel, "SPUBLISH", "SSUBSCRIBE", "SUNSUBSCRIBE")
	} else {
		add(channel, "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE")
	}
	all = append(all, use{words: []string{"PING"}})
	if c.s.Cluster() {
		all = append(all, use{words: []string{"CLUSTER", "SLOTS"}})
	}
	return all
}

func (u use) String() string {
	if u.on == "" {
		return strings.Join(u.words, " ")
	}
	return u.words[0] + " " + u.on
}

// probe asks every node.
func (c *Client) probe(ctx context.Context, uses []use) (Report, error) {
	nodes := c.conn.Nodes()
	addrs := slices.Sorted(maps.Keys(nodes))
	reports, errs := make([]Report, len(addrs)), make([]error, len(addrs))
	var wg sync.WaitGroup
	for i, addr := range addrs {
		wg.Go(func() { reports[i], errs[i] = probeNode(ctx, addr, nodes[addr], uses) })
	}
	wg.Wait()
	var all Report
	for _, r := range reports {
		all.Nodes = append(all.Nodes, r.Nodes...)
		all.Findings = append(all.Findings, r.Findings...)
	}
	return all, errors.Join(errs...)
}

func probeNode(ctx context.Context, addr string, conn rueidis.Client, uses []use) (Report, error) {
	var r Report
	lacks := func(problem, advice string, missing ...string) {
		r.Findings = append(r.Findings, Finding{Check: CheckCommands, Addr: addr, Problem: problem, Advice: advice, Missing: missing})
	}
	n := Node{Addr: addr}
	info, err := conn.Do(wire.Shared(ctx), conn.B().Info().Build()).ToString()
	if err != nil && !forbidden(err) {
		return r, fmt.Errorf("redlatch: probe %s: %w", addr, err)
	}
	n.readInfo(info)

	var args []string
	for _, u := range uses {
		args = append(append(args, strconv.Itoa(len(u.words))), u.words...)
	}
	asked := time.Now()
	answer, err := probeScript.Exec(ctx, conn, nil, args).AsIntSlice()
	n.RoundTrip = time.Since(asked)
	switch {
	case forbidden(err):
		lacks("scripts are forbidden: "+err.Error(), "allow this user the category @scripting", "EVALSHA", "EVAL")
	case err != nil:
		return r, fmt.Errorf("redlatch: probe %s: %w", addr, err)
	case len(answer) < 3:
		return r, fmt.Errorf("redlatch: probe %s: the answer has %d parts", addr, len(answer))
	default:
		if answer[0] != 0 {
			n.ClockOffset = time.UnixMicro(answer[0]*1e6 + answer[1]).Sub(asked.Add(n.RoundTrip / 2))
		}
		n.RightsKnown = answer[2] == 1
		var unknown, denied []string
		for _, number := range answer[3:] {
			if number < 0 {
				unknown = append(unknown, uses[-number-1].String())
			} else {
				denied = append(denied, uses[number-1].String())
			}
		}
		if len(unknown) > 0 {
			lacks("the server does not know "+strings.Join(unknown, ", "),
				"use a server that has these commands, and does not rename them", unknown...)
		}
		if len(denied) > 0 {
			lacks("this user may not "+strings.Join(denied, ", "),
				"allow the user these commands, keys and channels (ACL SETUSER)", denied...)
		}
	}

	r.Nodes, r.Findings = []Node{n}, append(r.Findings, n.findings()...)
	return r, nil
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
	return isReply && (strings.HasPrefix(reply.Error(), "NOPERM") || strings.HasPrefix(reply.Error(), "ERR unknown command"))
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

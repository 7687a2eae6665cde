// Package probe has the report of redlatch.Client.Probe: what is wrong with a server for locks, and what its user may not
// do.
package probe

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
)

//go:embed probe.lua
var probeLua string

var probeScript = wire.NewScript(probeLua)

// Check is a check of redlatch.Client.Probe.
type Check string

// Checks of redlatch.Client.Probe.
const (
	// CheckEviction: the server may evict locks when it runs out of memory.
	CheckEviction Check = "eviction"
	// CheckVersion: the server is older than the oldest supported version.
	CheckVersion Check = "version"
	// CheckClock: the server's clock is far from the clock of this machine.
	CheckClock Check = "clock"
	// CheckLatency: a round trip to the server takes more than a sixth of the watchdog timeout.
	CheckLatency Check = "latency"
	// CheckCommands: the server lacks a command, or the user may not use it, or not on
	// the keys and channels of a lock.
	CheckCommands Check = "commands"
)

// Finding is a property of a server that is a problem for locks.
type Finding struct {
	Check   Check
	Addr    string // address of the node
	Problem string
	Advice  string
	// Missing lists, for CheckCommands, what the server does not support or permit.
	// Kind is the kind of object that needs it: KindFair, KindReadWrite, KindSemaphore,
	// KindLatch, KindPlain, KindElection, KindOnce, or "" for the other locks of package
	// rlock. Fair locks and read-write locks also need what is missing for these, and
	// elections also need what is missing for fair locks.
	Missing []Right
	Kind    string
	// Rules are the rules for ACL SETUSER that permit what is missing. They are as narrow as the
	// probed names; an asterisk in a name also stands for other text. Without the right to run
	// scripts no other right can be checked, so there may be more after these. No rule makes a
	// server support a command.
	Rules []string
}

// Kinds of objects that need other rights than most locks of package rlock: fair locks,
// read-write locks, semaphores of either kind, count-down latches, plain locks, elections,
// the objects of Client.Once, rate limiters, and locks of values of a group.
const (
	KindFair      = "fair"
	KindReadWrite = "read-write"
	KindSemaphore = "semaphore"
	KindLatch     = "count-down latch"
	KindPlain     = "plain"
	KindElection  = "election"
	KindOnce      = "once"
	KindRate      = "rate limiter"
	KindGroup     = "group"
)

// kinds are all kinds with the plurals of their objects; "" is for the other locks of package
// rlock.
var kinds = []struct{ kind, objects string }{
	{"", ""}, {KindFair, "fair locks"}, {KindReadWrite, "read-write locks"}, {KindSemaphore, "semaphores"},
	{KindLatch, "count-down latches"}, {KindPlain, "plain locks"}, {KindElection, "elections"},
	{KindOnce, "once-only work"}, {KindRate, "rate limiters"}, {KindGroup, "group locks"},
}

// Right is a command with the key or channel it applies to, if any.
type Right struct{ Command, On string }

// String returns the command and the key or channel.
func (r Right) String() string { return strings.TrimSpace(r.Command + " " + r.On) }

// String returns a description of the finding.
func (f Finding) String() string {
	return fmt.Sprintf("%s: %s: %s; %s", f.Addr, f.Check, f.Problem, f.Advice)
}

// Node describes a server. Fields that the server does not report, or that the user may
// not read, are zero.
type Node struct {
	Addr    string
	Server  string // "redis" or "valkey"
	Version string
	Replica bool
	// EvictionPolicy is maxmemory-policy. It matters only if MaxMemory, in bytes, is
	// not 0.
	EvictionPolicy string
	MaxMemory      int64
	// ClockOffset is the server's clock minus the clock of this machine, with a precision of
	// half of RoundTrip.
	ClockOffset time.Duration
	RoundTrip   time.Duration
	// RightsKnown reports whether the server could check every right, as Redis and Valkey
	// from 7.0 can. Otherwise a command without a finding may be forbidden.
	RightsKnown bool
}

// Report is the result of redlatch.Client.Probe.
type Report struct {
	Nodes    []Node // sorted by address
	Findings []Finding
}

// The oldest supported versions. Servers with other names are not checked.
var oldest = map[string][2]int{"redis": {6, 2}, "valkey": {7, 2}}

// maxClockOffset exceeds the error of any maintained clock. Redisson compares clocks of
// different machines; redlatch does so only to a minute, for requests to semaphores.
const maxClockOffset = time.Second

// ofClient is the object of errors.
var ofClient = wire.Object{Kind: "client"}

// Run is Client.Probe of the client with that session and connection.
func Run(ctx context.Context, s *session.Session, conn rueidis.Client, names []string) (Report, error) {
	if err := s.Check(ctx); err != nil {
		return Report{}, ofClient.Refused("probe", err)
	}

	var uses []use
	for _, name := range names {
		key := s.MapName(name)
		if err := cmp.Or(s.CheckName(name), s.CheckName(key)); err != nil {
			return Report{}, ofClient.Refused("probe", err)
		}
		uses = append(uses, usesOf(key, s.ID, s.Cluster(), s.Sharded)...)
	}

	began := time.Now()
	report, err := ask(ctx, wire.Shared(ctx), s, conn, uses)
	return report, ofClient.ReadFailed(ctx, "probe", began, err)
}

// startupName is the artificial lock name of the startup checks.
const startupName = "redlatch-startup-check"

// startupTimeout bounds the startup checks.
const startupTimeout = 2 * time.Second

// LogAtStartup logs the findings for an artificial name, unless this user's locks seem to have other names. Its requests
// are abandoned when ctx ends, or after 2 s.
func LogAtStartup(ctx context.Context, s *session.Session, conn rueidis.Client) {
	ctx, cancel := context.WithTimeout(ctx, startupTimeout)
	defer cancel()

	key := s.MapName(startupName)
	if s.CheckName(key) != nil {
		return // the first use of a lock reports the error
	}

	uses := usesOf(key, s.ID, s.Cluster(), s.Sharded)
	uses = slices.DeleteFunc(uses, func(u use) bool { return u.kind != "" })
	report, err := ask(ctx, context.WithoutCancel(ctx), s, conn, uses)
	if err != nil {
		s.Logger.Warn("redlatch: startup check: incomplete", "error", err)
	}
	for _, f := range report.Findings {
		permitted := func(u use) bool { return u.On == key && !slices.Contains(f.Missing, u.Right) }
		if len(f.Missing) > 0 && !slices.ContainsFunc(uses, permitted) {
			// This user's locks have other names.
			f.Missing = slices.DeleteFunc(f.Missing, func(r Right) bool { return r.On != "" })
			if len(f.Missing) == 0 {
				continue
			}
			f.Problem = denied(f.Missing)
		}
		s.Logger.Warn("redlatch: startup check: "+f.Problem, "check", string(f.Check), "addr", f.Addr, "advice", f.Advice)
	}
}

// ask checks all nodes concurrently, with requests under the context request. It does
// not wait for nodes beyond the end of ctx.
func ask(ctx, request context.Context, s *session.Session, conn rueidis.Client, uses []use) (Report, error) {
	type reply struct {
		node     Node
		findings []Finding
		err      error
	}
	var r Report
	var errs []error
	for a := range wire.AskNodes(ctx, conn, func(addr string, node rueidis.Client) (a reply) {
		a.node, a.findings, a.err = probeNode(request, addr, node, uses, s.WatchdogTimeout)
		return a
	}) {
		r.Nodes = append(r.Nodes, a.node)
		r.Findings = append(r.Findings, a.findings...)
		errs = append(errs, a.err)
	}
	if ctx.Err() != nil && len(r.Nodes) < len(conn.Nodes()) {
		errs = append(errs, context.Cause(ctx))
	}
	slices.SortFunc(r.Nodes, func(a, b Node) int { return strings.Compare(a.Addr, b.Addr) })
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return strings.Compare(a.Addr, b.Addr) })
	return r, errors.Join(errs...)
}

func probeNode(ctx context.Context, addr string, conn rueidis.Client, uses []use, watchdogTimeout time.Duration,
) (Node, []Finding, error) {
	n := Node{Addr: addr}
	began := time.Now()
	info, err := conn.Do(ctx, conn.B().Info().Build()).ToString()
	if err != nil && !forbidden(err) {
		return n, nil, fmt.Errorf("%s: %w", addr, err)
	}

	n.readInfo(info)
	asked := time.Since(began)

	uses = slices.Concat(uses, accessOf(uses))
	var args []string
	for _, u := range uses {
		words := u.words()
		args = append(append(args, strconv.Itoa(len(words))), words...)
	}
	sent := time.Now()
	reply, err := wire.Numbers(probeScript.Exec(ctx, conn, nil, args), 3+len(uses), wire.Any)
	n.RoundTrip = time.Since(sent)
	var found []Finding
	if forbidden(err) {
		found = []Finding{withoutScripts(addr, err)}
		err = nil
	} else if err != nil {
		err = fmt.Errorf("%s: %w", addr, err)
	} else {
		if reply[0] != 0 {
			n.ClockOffset = time.UnixMicro(reply[0]*1e6 + reply[1]).Sub(sent.Add(n.RoundTrip / 2))
		}
		verdicts := make([]verdict, len(uses))
		for i := range uses {
			verdicts[i] = verdict(reply[3+i])
		}
		n.RightsKnown = reply[2] == 1 && !slices.Contains(verdicts, useUnknown)
		found = missing(addr, uses, verdicts)
	}

	// One of the requests may have had to open a connection or to send the script a second time.
	if err == nil {
		found = append(found, n.latency(min(asked, n.RoundTrip), watchdogTimeout)...)
	}
	return n, append(found, n.findings()...), err
}

// withoutScripts returns the finding about a server that has refused to run a script.
func withoutScripts(addr string, err error) Finding {
	f := Finding{Check: CheckCommands, Addr: addr}
	if unknownCommand(err) {
		f.Missing = []Right{{Command: "EVALSHA"}}
		if !strings.Contains(err.Error(), "EVALSHA") {
			f.Missing = []Right{{Command: "EVAL"}}
		}
		f.Problem = lacks(f.Missing)
		f.Advice = adviceUnsupported
		return f
	}

	f.Problem = "this user may not run scripts"
	f.Advice = "allow this user the category @scripting"
	f.Missing = []Right{{Command: "EVALSHA"}, {Command: "EVAL"}}
	f.Rules = []string{"+evalsha", "+eval"}
	return f
}

// missing returns the findings about the uses that the server refuses or does not support. It says
// nothing about those for which that is unknown.
func missing(addr string, uses []use, verdicts []verdict) (found []Finding) {
	rules := rulesOf(uses, verdicts)
	for _, kind := range kinds {
		lacking := Finding{Advice: adviceUnsupported}
		denies := Finding{Advice: "allow the user these commands, keys and channels (ACL SETUSER)"}
		for i, u := range uses {
			if u.kind != kind.kind {
				continue
			}
			switch verdicts[i] {
			case useUnsupported:
				if u.Command == "ASKING" {
					continue // a server without it, such as an embedded one, moves no slots
				}
				lacking.Missing = append(lacking.Missing, u.Right)
			case useRefused:
				denies.Missing = append(denies.Missing, u.Right)
				for _, rule := range rules[i] {
					if !slices.Contains(denies.Rules, rule) {
						denies.Rules = append(denies.Rules, rule)
					}
				}
			}
		}
		lacking.Problem = lacks(lacking.Missing)
		denies.Problem = denied(denies.Missing)
		for _, f := range []Finding{lacking, denies} {
			f.Check = CheckCommands
			f.Addr = addr
			f.Kind = kind.kind
			if f.Kind != "" {
				f.Problem = "for " + kind.objects + ": " + f.Problem
			}
			if len(f.Missing) > 0 {
				found = append(found, f)
			}
		}
	}

	return found
}

const adviceUnsupported = "use a server that has these commands and does not rename them"

func lacks(rights []Right) string { return "the server does not support " + joined(rights) }

func denied(rights []Right) string { return "this user may not " + joined(rights) }

func joined(rights []Right) string {
	words := make([]string, len(rights))
	for i, r := range rights {
		words[i] = r.String()
	}
	return strings.Join(words, ", ")
}

// latency returns the finding that a round trip leaves too little of the watchdog timeout for renewals.
func (n *Node) latency(roundTrip, watchdogTimeout time.Duration) []Finding {
	if roundTrip <= watchdogTimeout/6 {
		return nil
	}

	return []Finding{{
		Check: CheckLatency, Addr: n.Addr,
		Problem: fmt.Sprintf("a round trip takes %v, more than a sixth of the watchdog timeout of %v",
			roundTrip.Round(time.Millisecond), watchdogTimeout),
		Advice: "use a longer watchdog timeout: one lost reply may cost a hold, and a round trip of half the timeout costs all",
	}}
}

// findings returns the problems visible in n.
func (n *Node) findings() (all []Finding) {
	find := func(check Check, problem, advice string) {
		all = append(all, Finding{Check: check, Addr: n.Addr, Problem: problem, Advice: advice})
	}
	if least, judged := oldest[n.Server]; judged && olderThan(n.Version, least) {
		find(CheckVersion, fmt.Sprintf("%s %s is older than %d.%d, the oldest supported version", n.Server, n.Version, least[0], least[1]),
			"upgrade the server")
	}
	if n.MaxMemory > 0 && n.EvictionPolicy != "noeviction" && n.EvictionPolicy != "" && !n.Replica {
		find(CheckEviction, fmt.Sprintf("with maxmemory-policy %s the server may evict locks", n.EvictionPolicy),
			"set maxmemory-policy to noeviction, or keep locks on a server of their own")
	}
	if off := n.ClockOffset.Abs() - n.RoundTrip/2; off > maxClockOffset {
		find(CheckClock, fmt.Sprintf("the server's clock is %v off that of this machine", n.ClockOffset.Round(time.Millisecond)),
			"synchronise the clocks: Redisson's fair locks and permits compare them")
	}
	return all
}

// forbidden reports whether err is a permanent refusal of a command.
func forbidden(err error) bool {
	reply, isReply := rueidis.IsRedisErr(err)
	return isReply && strings.HasPrefix(reply.Error(), "NOPERM") || unknownCommand(err)
}

// unknownCommand reports whether err says that the server does not know a command.
func unknownCommand(err error) bool {
	reply, isReply := rueidis.IsRedisErr(err)
	return isReply && strings.HasPrefix(reply.Error(), "unknown command")
}

// readInfo parses the reply to INFO.
func (n *Node) readInfo(info string) {
	fields := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}

	n.Server = cmp.Or(fields["server_name"], "redis")
	n.Version = cmp.Or(fields[n.Server+"_version"], fields["redis_version"])
	if n.Version == "" {
		n.Server = ""
	}
	n.Replica = fields["role"] == "slave"
	n.EvictionPolicy = fields["maxmemory_policy"]
	n.MaxMemory, _ = strconv.ParseInt(fields["maxmemory"], 10, 64)
}

func olderThan(version string, least [2]int) bool {
	var v [2]int
	n, _ := fmt.Sscanf(version, "%d.%d", &v[0], &v[1])
	return n == 2 && slices.Compare(v[:], least[:]) < 0
}

//go:build !race

package benchmarks

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// cost is what an operation without contention costs: a pair of an acquisition and its release,
// one call of a latch, a term, or a run of work that does nothing.
type cost struct {
	kind     string
	scripts  float64 // that the servers run
	commands float64 // that the servers run besides, mostly in scripts
	allocs   int
	bytes    int // see tolerance
}

// costs are those of each kind. A change of a row is a decision: -update writes the measured
// costs into this table, and the change shows what they were before.
var costs = []cost{
	{"lock", 2, 6, 9, 1032},
	{"lock, Wrap", 2, 6, 24, 2176},
	{"fair", 2, 6, 15, 1424},
	{"read", 2, 14, 20, 1376},
	{"write", 2, 10, 17, 1280},
	{"fenced", 2, 8, 11, 1096},
	{"plain", 2, 4, 12, 1144},
	{"spin", 2, 5, 9, 1032},
	{"multi of 3", 2, 14, 18, 3232},
	{"red of 3", 6, 18, 70, 6577},
	{"semaphore", 2, 12, 21, 1473},
	{"permit semaphore", 2, 20, 27, 2034},
	{"semaphore, IdleTTL", 2, 14, 21, 1473},
	{"permit semaphore, IdleTTL", 2, 27, 27, 2036},
	{"CountDown", 1, 4, 14, 766},
	{"Wait, open latch", 1, 3, 30, 2008},
	{"election", 3, 12, 29, 2200},
	{"Once.Run", 2, 9, 55, 3864},
	{"Once.Run, done slot", 0, 1, 8, 536},
}

// tolerance is by how much the bytes may differ. They are not exact: owners and requests contain
// numbers, whose texts grow, and maps and channels grow now and then.
const tolerance = 16

var update = flag.Bool("update", false, "write the measured costs into costs_test.go")

// Clients: one for each server of a Redlock, and one that borrows its connection.
const (
	costServers = 3
	borrower    = costServers
)

// costly returns the operation of each kind. Calls have a context that can be canceled, like those
// of a service.
func costly(ctx context.Context, kind string, clients []*redlatch.Client) (func() error, error) {
	c := clients[0]
	pair := func(l lock.Locker) (func() error, error) {
		return func() error {
			h, err := l.Lock(ctx)
			if err != nil {
				return err
			}
			return h.Unlock(ctx)
		}, nil
	}
	nothing := func(context.Context) error { return nil }
	switch kind {
	case "lock":
		return pair(c.Lock(kind))
	case "lock, Wrap":
		return pair(clients[borrower].Lock(kind))
	case "fair":
		return pair(c.FairLock(kind))
	case "read":
		return pair(c.RWLock(kind).Read())
	case "write":
		return pair(c.RWLock(kind).Write())
	case "fenced":
		return pair(c.FencedLock(kind))
	case "plain":
		return pair(c.PlainLock(kind))
	case "spin":
		return pair(c.SpinLock(kind))
	case "multi of 3":
		return pair(c.MultiLock(c.Lock("{multi}-1"), c.Lock("{multi}-2"), c.Lock("{multi}-3")))
	case "red of 3":
		l := redlatch.RedLock(kind, clients[:costServers])
		return func() error {
			h, err := l.Lock(ctx)
			if err != nil {
				return err
			}
			settle(clients)
			defer settle(clients)
			return h.Unlock(ctx)
		}, nil
	case "semaphore", "semaphore, IdleTTL":
		s := c.Semaphore(kind, permits(kind)...)
		return func() error {
			return cmp.Or(s.Acquire(ctx, 1), s.Release(ctx, 1))
		}, nil
	case "permit semaphore", "permit semaphore, IdleTTL":
		s := c.PermitSemaphore(kind, permits(kind)...)
		return func() error {
			p, err := s.Acquire(ctx, 1)
			if err != nil {
				return err
			}
			return p.Release(ctx)
		}, nil
	case "CountDown":
		l := c.CountDownLatch(kind)
		_, err := l.TrySetCount(ctx, 1_000_000)
		return func() error {
			_, err := l.CountDown(ctx)
			return err
		}, err
	case "Wait, open latch":
		l := c.CountDownLatch(kind)
		return func() error { return l.Wait(ctx) }, nil
	case "election":
		e := c.Election(kind)
		return func() error {
			term, err := e.Campaign(ctx, "host-7:8080")
			if err != nil {
				return err
			}
			return term.Resign(ctx)
		}, nil
	case "Once.Run":
		job, slot := c.Once(kind), 0
		return func() error {
			slot++
			_, err := job.Run(ctx, strconv.Itoa(1_000_000+slot), nothing)
			return err
		}, nil
	case "Once.Run, done slot":
		job := c.Once(kind)
		return func() error {
			_, err := job.Run(ctx, "1", nothing)
			return err
		}, nil
	}
	return nil, fmt.Errorf("unknown kind %q", kind)
}

// permits returns the options of a semaphore.
func permits(kind string) []semaphore.Option {
	opts := []semaphore.Option{semaphore.Permits(8)}
	if strings.HasSuffix(kind, "IdleTTL") {
		opts = append(opts, semaphore.IdleTTL(time.Hour))
	}
	return opts
}

// TestCosts verifies that operations cost exactly what the table says.
func TestCosts(t *testing.T) {
	program := redisProgram(t)
	var addrs []string
	for range costServers {
		s, err := testserver.Start(program)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Stop)
		addrs = append(addrs, s.Addr)
	}
	for _, want := range costs {
		t.Run(want.kind, func(t *testing.T) {
			got := costOf(t, want.kind, addrs)
			t.Log(got.row())
			off := got.bytes - want.bytes
			if off < 0 {
				off = -off
			}
			if off <= tolerance {
				got.bytes = want.bytes
			}
			if got == want {
				return
			}
			if *update {
				replaceRow(t, got)
				return
			}
			t.Errorf("a different cost: %s. If that is intended, run this test with -update, or replace the row by\n%s",
				got.differences(want), got.row())
		})
	}
}

// redisProgram returns the server of the first tier.
func redisProgram(t *testing.T) string {
	t.Helper()
	chosen := testserver.Chosen()
	if len(chosen) == 0 {
		t.Fatal(testserver.Missing)
	}
	return chosen[0]
}

// costOf measures an operation of a kind several times. Whatever else the process does, such as
// the work of the connection between operations, can only add to the cost, so the least counts.
func costOf(t *testing.T, kind string, addrs []string) cost {
	t.Helper()
	const rounds, operations = 5, 200
	ctx := t.Context()
	var clients []*redlatch.Client
	for _, addr := range addrs {
		c, err := redlatch.Open(ctx, "redis://"+addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		clients = append(clients, c)
	}
	shared, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: addrs[:1], DisableCache: true, ConnWriteTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shared.Close)
	c, err := redlatch.Wrap(ctx, shared)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	clients = append(clients, c)
	operation, err := costly(ctx, kind, clients)
	if err != nil {
		t.Fatal(err)
	}
	repeat := func() {
		for range operations {
			if err := operation(); err != nil {
				t.Fatal(err)
			}
		}
	}
	repeat() // scripts are loaded, and pools filled
	settle(clients)
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var least struct{ scripts, commands, allocs, bytes int }
	for round := range rounds {
		runtime.GC()
		var before, after runtime.MemStats
		scripts, commands := serverCalls(t, addrs)
		runtime.ReadMemStats(&before)
		repeat()
		runtime.ReadMemStats(&after)
		settle(clients)
		moreScripts, moreCommands := serverCalls(t, addrs)
		lower := func(of *int, v int) {
			if round == 0 || v < *of {
				*of = v
			}
		}
		lower(&least.scripts, moreScripts-scripts)
		lower(&least.commands, moreCommands-commands)
		lower(&least.allocs, int(after.Mallocs-before.Mallocs))
		lower(&least.bytes, int(after.TotalAlloc-before.TotalAlloc))
	}
	return cost{
		kind: kind, scripts: float64(least.scripts) / operations, commands: float64(least.commands) / operations,
		allocs: least.allocs / operations, bytes: least.bytes / operations,
	}
}

// settle blocks until no requests are under way. A Redlock does not wait for its last server, and
// an early release makes a request to it unnecessary.
func settle(clients []*redlatch.Client) {
	for _, c := range clients {
		for s := c.Stats(); s.Waiting+s.Attempting+s.Background > 0; s = c.Stats() {
			time.Sleep(100 * time.Microsecond)
		}
	}
}

// serverCalls returns the numbers of scripts and of other commands that the servers have run.
func serverCalls(t *testing.T, addrs []string) (scripts, commands int) {
	t.Helper()
	for _, addr := range addrs {
		stats, err := testserver.Info(addr, "commandstats")
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range stats {
			calls, _, _ := strings.Cut(strings.TrimPrefix(value, "calls="), ",")
			n, err := strconv.Atoi(calls)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			switch name = strings.TrimPrefix(name, "cmdstat_"); {
			case name == "info", name == "ping": // of this test, and of an idle connection
			case strings.HasPrefix(name, "eval"), strings.HasPrefix(name, "fcall"):
				scripts += n
			default:
				commands += n
			}
		}
	}
	return scripts, commands
}

func (c cost) row() string {
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	return fmt.Sprintf("\t{%q, %s, %s, %d, %d},", c.kind, number(c.scripts), number(c.commands), c.allocs, c.bytes)
}

func (c cost) differences(want cost) string {
	var all []string
	differ := func(what string, got, want float64) {
		if got != want {
			all = append(all, fmt.Sprintf("%v %s, want %v", got, what, want))
		}
	}
	differ("scripts", c.scripts, want.scripts)
	differ("commands", c.commands, want.commands)
	differ("allocations", float64(c.allocs), float64(want.allocs))
	differ("bytes", float64(c.bytes), float64(want.bytes))
	return strings.Join(all, "; ")
}

func replaceRow(t *testing.T, c cost) {
	t.Helper()
	const file = "costs_test.go"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\t\{"` + regexp.QuoteMeta(c.kind) + `", .*$`)
	if err := os.WriteFile(file, row.ReplaceAllLiteral(text, []byte(c.row())), 0o644); err != nil {
		t.Fatal(err)
	}
}

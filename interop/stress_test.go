package interop

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A contest is the work of many contenders at the same time, some in processes with
// redlatch and some in processes with Redisson (see Contenders.java). The kinds of work are:
//
//   - exclude: increments the counters of a lock, not atomically
//   - share: reads or writes two counters that are always written together
//   - limit: acquires a permit and counts the permits in use
//   - count: counts down and waits for all others
//
// Contenders start together and share the number of rounds, except that with the work count
// each contender takes part in every round. Half of them are named owners in Go, and half
// are asynchronous in Java.
type contest struct {
	Work   string `json:"work"`
	Rounds int    `json:"rounds"`
	Limit  int    `json:"limit"` // of permits
	// Contenders is the number of contenders of each process, and All the total.
	Contenders int `json:"contenders"`
	All        int `json:"all"`
	// Servers has the addresses of each server, or of the nodes of each cluster. The first
	// counts the rounds.
	Servers [][]string `json:"servers"`
	// Objects are the contended objects. The contenders of a process use them in turn.
	Objects []object `json:"objects"`
}

// object describes an object, or a composite lock.
type object struct {
	Kind    string   `json:"kind"`
	Name    string   `json:"name"`
	At      int      `json:"at"` // index of the server
	Members []object `json:"members"`
}

// in returns the description for a process with Redisson.
func (o object) in(clients []*redisson) command {
	if o.Members == nil {
		return clients[o.At].object(o.Kind, o.Name)
	}
	var members []command
	for _, m := range o.Members {
		members = append(members, m.in(clients))
	}
	return command{"client": clients[0].name, "kind": o.Kind, "members": members}
}

// lock returns the lock.
func (o object) lock(clients []*redlatch.Client) lock.Locker {
	var members []lock.Locker
	for _, m := range o.Members {
		members = append(members, m.lock(clients))
	}
	switch o.Kind {
	case "multi":
		return clients[0].MultiLock(members...)
	case "red":
		return clients[0].RedLock(members...)
	}
	return goLock(clients[o.At], o.Kind, o.Name)
}

// names returns the names of the locks that a holder of the object holds.
func (o object) names() (names []string) {
	if o.Members == nil {
		return []string{o.Name}
	}
	for _, m := range o.Members {
		names = append(names, m.names()...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// hold runs the contest with that many processes of Go, and those of Java, and returns the
// results, those of Go first. No contender fails or waits for ever.
func (c contest) hold(t *testing.T, envs []*env, gos int, javas []*jvm) []result {
	t.Helper()
	const d = 3 * time.Minute
	c.All = (gos + len(javas)) * c.Contenders
	for _, p := range envs {
		c.Servers = append(c.Servers, p.addrs())
	}
	var calls []*call
	for _, j := range javas {
		var clients []*redisson
		for _, p := range envs {
			clients = append(clients, j.client(t, p))
		}
		var objects []command
		for _, o := range c.Objects {
			objects = append(objects, o.in(clients))
		}
		calls = append(calls, j.give(t, command{
			"do": "run", "client": clients[0].name, "work": c.Work, "objects": objects,
			"contenders": c.Contenders, "all": c.All, "rounds": c.Rounds, "limit": c.Limit,
		}))
	}
	spec, err := json.Marshal(c)
	require.NoError(t, err)
	var procs []*harness.Process
	for range gos {
		procs = append(procs, harness.Spawn(t, "contend", string(spec)))
	}
	begin := time.Now()
	results := make([]result, gos+len(javas))
	for i, call := range calls {
		a, err := call.within(t, d-time.Since(begin))
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(a.Value, &results[gos+i]))
	}
	for i, p := range procs {
		require.NoError(t, json.Unmarshal([]byte(p.Line(max(d-time.Since(begin), time.Second))), &results[i]))
		p.Ended(10 * time.Second)
	}
	had := 0
	for i, r := range results {
		language := "Go"
		if i >= gos {
			language = "Java"
		}
		had += sum(r.Shares)
		t.Logf("%s: %d rounds, %d to %d for each contender, the longest wait %d ms",
			language, sum(r.Shares), slices.Min(r.Shares), slices.Max(r.Shares), r.Longest)
	}
	t.Logf("%d rounds in %v", had, time.Since(begin).Round(time.Millisecond))
	if c.Work != "count" {
		require.Equal(t, c.Rounds, had)
	}
	return results
}

// TestContendersOfBothLanguages has two processes of Go and two of Java, with 16 contenders
// each, contend for one object of each kind. It is exact, all contenders make progress, and
// nothing is left.
func TestContendersOfBothLanguages(t *testing.T) {
	harness.Full(t)
	const contenders, limit = 16, 4
	second := spawnJVM(t, newest) // for the kinds that no other version has
	eachEnv(t, []string{newest}, func(t *testing.T, p *env) {
		full := !p.cluster && !p.servers[0].Valkey()
		both := []*jvm{p.j, shared(t, before)}
		contend := func(work, kind string, rounds int, prepare, check func(t *testing.T)) {
			t.Run(kind, func(t *testing.T) {
				for _, s := range p.servers {
					harness.Do(t, s.Addr, "FLUSHALL")
				}
				prepare(t)
				javas := both
				if !has(before, kind) {
					javas = []*jvm{p.j, second}
				}
				c := contest{
					Work: work, Rounds: rounds, Limit: limit, Contenders: contenders,
					Objects: []object{{Kind: kind, Name: "orders"}},
				}
				results := c.hold(t, []*env{p}, 2, javas)
				check(t)
				p.nothingStays(t)
				if full && work != "count" {
					nobodyStarves(t, kind, results[:2], results[2:])
				}
			})
		}
		rounds := 10_000
		if !full {
			rounds = 1000
		}
		number := func(t *testing.T, key string) int {
			n, err := do(t, p.conn(t), "GET", key).AsInt64()
			require.NoError(t, err)
			return int(n)
		}
		nothing := func(*testing.T) {}
		for _, kind := range []string{"lock", "non-reentrant", "fenced", "spin", "fair", "non-reentrant fair", "write"} {
			contend("exclude", kind, rounds, nothing, func(t *testing.T) {
				require.Equal(t, rounds, number(t, "counter:orders"))
				if kind == "fenced" { // tokens that were drawn for waiters may be left over
					require.Greater(t, 2*rounds, number(t, "redisson_lock_token:{orders}"))
				}
			})
		}
		contend("share", "read", rounds, nothing, func(t *testing.T) {
			writes := number(t, "writes")
			require.Greater(t, writes, rounds/8)
			require.Equal(t, writes, number(t, "counter:a"))
			require.Equal(t, writes, number(t, "counter:b"))
		})
		contend("limit", "semaphore", rounds, func(t *testing.T) {
			p.theirs(t).on(t, "semaphore", "orders", "trySetPermitsAsync", limit).must(t, nil)
		}, func(t *testing.T) {
			require.Zero(t, number(t, "used"))
			require.Equal(t, limit, number(t, "orders"))
		})
		contend("limit", "permits", rounds, func(t *testing.T) {
			_, err := p.ours(t).PermitSemaphore("orders").TrySetPermits(t.Context(), limit)
			require.NoError(t, err)
		}, func(t *testing.T) {
			require.Zero(t, number(t, "used"))
			require.Equal(t, limit, number(t, "orders"))
		})
		latches := rounds / 200
		contend("count", "latch", latches, func(t *testing.T) {
			theirs := p.theirs(t)
			for i := range latches {
				name := fmt.Sprint("orders", i)
				if i%2 == 0 {
					theirs.on(t, "latch", name, "trySetCountAsync", 4*contenders).must(t, nil)
				} else {
					set, err := p.ours(t).CountDownLatch(name).TrySetCount(t.Context(), 4*contenders)
					require.NoError(t, err)
					require.True(t, set)
				}
			}
		}, nothing)
	})
}

// nothingStays fails the test unless the servers soon keep only the numbers of a contest, free
// permits, the last token, and keys that expire.
func (p *env) nothingStays(t *testing.T) {
	t.Helper()
	stays := func(addr, key string) bool {
		name, _, _ := strings.Cut(key, ":")
		switch name {
		case "ready", "tickets", "writes", "used", "counted", "counter", "redisson_lock_token":
			return false
		case "redisson_unlock_latch", "redlatch_sc_request", "redlatch_latch_round":
			return harness.PTTL(t, addr, key) == -1
		case "orders":
			return harness.Do(t, addr, "TYPE", key) != "+string"
		}
		return true
	}
	for _, s := range p.servers {
		var keys []string
		harness.Eventually(t, 10*time.Second, "nothing stays", func() bool {
			var err error
			keys, err = testserver.Query(s.Addr, "KEYS", "*")
			require.NoError(t, err)
			return !slices.ContainsFunc(keys, func(key string) bool { return stays(s.Addr, key) })
		})
	}
}

// nobodyStarves fails the test if a process, or a contender of Go, had far fewer rounds than
// others. Redisson serves waiters in random order, except for fair locks. A process of Go has
// up to 16 rounds before it leaves the lock open, and one of Java has one. Spin locks are
// shared between processes at random and unevenly: in Java each thread retries, in Go one
// waiter for the whole process, after growing pauses. There every contender makes progress.
func nobodyStarves(t *testing.T, kind string, ours, theirs []result) {
	t.Helper()
	var all []int
	for _, r := range slices.Concat(ours, theirs) {
		all = append(all, r.Shares...)
	}
	if kind == "spin" {
		for _, r := range ours {
			require.Positive(t, slices.Min(r.Shares), "a contender of Go")
		}
		for _, r := range theirs {
			require.Positive(t, sum(r.Shares), "a process of Java")
		}
		return
	}
	equal := sum(all) / len(all)
	for _, r := range theirs { // a fifth of one round for 16 of a process of Go
		require.Greater(t, 80*sum(r.Shares)/len(r.Shares), equal, "a process of Java")
	}
	for _, r := range ours { // first come, first served
		require.Greater(t, sum(r.Shares)/len(r.Shares), equal/10, "a process of Go")
		require.Greater(t, slices.Min(r.Shares), sum(r.Shares)/len(r.Shares)/2, "a contender of Go")
	}
	if strings.HasSuffix(kind, "fair") { // some start a little later, or pause for garbage collection
		require.Less(t, slices.Max(all)-slices.Min(all), equal/4)
	}
}

func sum(of []int) (n int) {
	for _, i := range of {
		n += i
	}
	return n
}

package main

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

func mustLock(t testing.TB, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	t.Cleanup(func() { runtime.KeepAlive(h) })
	return h
}

// masked replaces what differs from run to run.
func masked(text string) string {
	text = regexp.MustCompile(`[0-9a-f-]{36}:\d+`).ReplaceAllString(text, "OWNER")
	text = regexp.MustCompile(`\d+@\S+( at [0-9.:]+)?`).ReplaceAllString(text, "PROCESS")
	text = regexp.MustCompile(`process \d+ on host \S+, connected from [0-9.:]+`).ReplaceAllString(text, "process PID on host HOST, connected from ADDRESS")
	text = regexp.MustCompile(`\b(\d+m)?\d+(\.\d+)?m?s\b`).ReplaceAllString(text, "TIME")
	return regexp.MustCompile(` +`).ReplaceAllString(text, " ")
}

// A terminal shows what names, owners and values are, and does not obey them.
func TestControlCharactersAreNotPrinted(t *testing.T) {
	const odd = "a\x1b[2J\x07\x7f\u009b31m\u202ex\U000e0041"
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h := mustLock(t, harness.Client(t, s).Lock(odd))
		term, err := harness.Client(t, s).Election("job").Campaign(t.Context(), odd)
		require.NoError(t, err)
		for _, args := range [][]string{
			{"inspect", odd, "job"}, {"inspect", "--json", odd, "job"}, {"ls"}, {"ls", "--json"}, {"doctor", odd}, {"unlock", "--force", odd},
			{"unlock", "--force", odd},
		} {
			out := succeeds(t, s.Addr, args...)
			require.Equal(t, -1, strings.IndexFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }), "%v: %q", args, out)
			if slices.Contains(args, "--json") {
				var names []string
				for d := json.NewDecoder(strings.NewReader(out)); d.More(); {
					var o inspect.Object
					require.NoError(t, d.Decode(&o))
					names = append(names, o.Name)
				}
				require.Contains(t, names, odd)
			}
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, term.Resign(t.Context()))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// What is printed of a URL has no password, wherever that stands.
func TestPlace(t *testing.T) {
	for url, want := range map[string]string{
		"redis://app:secret@db:6379/3":          "redis://db:6379",
		"redis://db?password=secret":            "redis://db",
		"rediss://db/?sentinel_password=secret": "rediss://db",
		"redis:secret@db":                       "the server",
		"redis://app:sec/ret@db":                "the server",
		"secret":                                "the server",
		"unix:///run/secret.sock":               "the server",
	} {
		require.Equal(t, want, place(url))
	}
}

// Each part that an object can have is printed.
func TestPrintedObjects(t *testing.T) {
	var out strings.Builder
	holders := []inspect.Holder{
		{Owner: inspect.Owner{ID: "a\x1b[2J", Library: "Redisson"}, Mode: "write", Lease: new(inspect.Millis(90 * time.Second))},
		{Owner: inspect.Owner{ID: "b", Library: "other"}, Mode: "read", Count: 2, Lease: new(inspect.Millis(0))},
	}
	require.NoError(t, printObjects(&out, []inspect.Object{
		{Name: "rw", Key: "rw", Kind: inspect.RWLock, Held: true, Holders: holders, Waiting: 3, Subscribers: -1, Truncated: true},
		{Name: "s", Key: "s", Kind: inspect.Semaphore, Permits: &inspect.PermitNumbers{Free: 4, Held: -1}},
		{Name: "p", Key: "p", Kind: inspect.Semaphore, Held: true, Permits: &inspect.PermitNumbers{Free: 4, Held: 1}},
		{Name: "l", Key: "l", Kind: inspect.Latch, Count: new(int64(2)), Subscribers: 1},
		{Name: "o", Key: "o", Kind: inspect.Latch, Count: new(int64(0))},
		{Name: "r", Key: "r", Kind: inspect.Rate, Limit: &inspect.Limit{Rate: 10, Per: inspect.Millis(time.Minute), Used: new(int64(3))}},
		{Name: "e", Key: "e", Kind: inspect.Election, Token: new(int64(7)), Leader: &inspect.Term{Token: 9, Value: "host\n"}},
		{Name: "x", Key: "x", Kind: inspect.Other, Anomalies: []inspect.Anomaly{{Code: "wrong-type", Text: "The key is a set."}}},
	}, false))
	require.Equal(t, `name     rw
kind     read-write lock
state    held for writing
expires  never
waiting  3

HOLDER      LEASE  LIBRARY
"a\x1b[2J"  1m30s  Redisson  write
b           over   other     read, 2 holds

There are more than are shown.

name         s
kind         semaphore
state        4 free
subscribers  0

name         p
kind         semaphore
state        4 free, 1 held
subscribers  0

name         l
kind         count-down latch
state        2
subscribers  1

name         o
kind         count-down latch
state        open
subscribers  0

name         r
kind         rate limiter
state        3 used of 10 per 1m0s
subscribers  0

name         e
kind         election
state        free
token        7
term         9  "host\n"  ended
subscribers  0

name         x
kind         another type of key
state        -
subscribers  0

ANOMALIES
The key is a set.
`, out.String())
}

func TestList(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		h := mustLock(t, c.Lock("orders:7"))
		fenced := mustLock(t, c.FencedLock("orders:8"))
		require.NoError(t, fenced.Unlock(t.Context()))
		jobs := mustLock(t, c.Lock("jobs"))
		harness.Do(t, s.Addr, "SET", "page:1", "17")

		out := succeeds(t, s.Addr, "ls")
		require.Equal(t, `NAME KIND STATE EXPIRES WAITERS HOLDER
jobs lock held TIME - OWNER
orders:7 lock held TIME - OWNER
orders:8 fenced free - - -
`, masked(out))
		require.Contains(t, out, lock.OwnerOf(h).String())
		out = succeeds(t, s.Addr, "ls", "orders:*", "--held")
		require.Equal(t, "NAME KIND STATE EXPIRES WAITERS HOLDER\norders:7 lock held TIME - OWNER\n", masked(out))
		out = succeeds(t, s.Addr, "ls", "--json")
		require.Equal(t, 3, strings.Count(out, "\n"))
		require.Regexp(t, `"name":"jobs",.*"expires_ms":\d{4,5}\b`, out)
		require.NotContains(t, out, "null")
		out = succeeds(t, s.Addr, "ls", "--json", "*8")
		var o inspect.Object
		require.NoError(t, json.Unmarshal([]byte(out), &o))
		require.Equal(t, "orders:8", o.Name)
		require.Equal(t, statusFailed, finish(t, s.Addr, "ls", "[").status)

		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, jobs.Unlock(t.Context()))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// doctor watches for as long as there may be something to see.
func TestDoctor(t *testing.T) {
	const timeout = 3 * time.Second // renewed each second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		watch := func(status int, d time.Duration) string {
			t.Helper()
			r := finish(t, s.Addr, "doctor", "--watch", d.String(), "jobs")
			require.Equal(t, status, r.status, r.stderr)
			return masked(r.stdout)
		}
		require.Equal(t, `No key of jobs exists: it is free.
If a client does not get it all the same, compare its server, database and name prefix.
`, watch(0, time.Hour))

		h := mustLock(t, harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)).Lock("jobs"))
		require.Equal(t, `jobs is a lock: held.
OWNER of redlatch holds it; its lease ends in TIME.
That is process PID on host HOST, connected from ADDRESS for TIME. It sent its last request TIME ago.
Its lease was renewed while doctor watched: the holder's process lives.
`, watch(0, time.Hour))
		require.NoError(t, h.Unlock(t.Context()))

		mustLock(t, harness.Client(t, s).Lock("jobs"), lock.Lease(time.Minute))
		require.Contains(t, watch(0, 400*time.Millisecond), "Its lease was not renewed for TIME, but so long a lease is renewed later")
		harness.Do(t, s.Addr, "PERSIST", "jobs")
		require.Equal(t, `jobs is a lock: held.
OWNER of redlatch holds it; its lease never ends.
That is process PID on host HOST, connected from ADDRESS for TIME. It sent its last request TIME ago.
If the holder does not exist any more, use this command: redlatch unlock --force jobs
PROBLEM: The lock has no expiry: it stays held if its holder dies.
`, watch(1, time.Hour))

		harness.Do(t, s.Addr, "DEL", "jobs")
		harness.Do(t, s.Addr, "SADD", "jobs", "a")
		require.Equal(t, "PROBLEM: The key is a set that is no object of redlatch: requests that use it fail.\n", watch(1, time.Hour))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A lock that changes hands is in use.
func TestDoctorSeesAHandOver(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h := mustLock(t, harness.Client(t, s).Lock("jobs"), lock.Lease(time.Minute))
		next := harness.Client(t, s)
		waiter := harness.Start(t, t.Context(), func(ctx context.Context) (lock.Hold, error) { return next.Lock("jobs").Lock(ctx) })
		harness.Eventually(t, patience, "it waits", func() bool { return next.Stats().PubSub.Subscribed == 1 })
		conn := harness.Conn(t, s.Addr)
		before := harness.Commands(t, conn)["type"]
		r := start(t, s.Addr, "doctor", "--watch", "1m", "jobs")
		harness.Eventually(t, patience, "doctor reads", func() bool { return harness.Commands(t, conn)["type"] > before })
		require.NoError(t, h.Unlock(t.Context()))
		defer waiter.Got().Unlock(context.Background())
		require.Zero(t, r.status(patience))
		var out []string
		for line := range r.lines {
			out = append(out, line)
		}
		require.Contains(t, out, "It changed hands while doctor watched: it is in use, and not stuck.")
	})
}

// What doctor says about each state.
func TestDiagnoses(t *testing.T) {
	ms := func(d time.Duration) *inspect.Millis { return new(inspect.Millis(d)) }
	waiter := inspect.Waiter{Owner: inspect.Owner{ID: "w", Library: "redlatch", Connection: &inspect.Connection{
		Process: wire.Process{Host: "web-3", PID: 7}, Address: "h:1", Age: inspect.Millis(time.Minute),
	}}, Alive: ms(8 * time.Second)}
	for _, c := range []struct {
		name string
		last inspect.Object
		want []string
	}{
		{"free lock", inspect.Object{Kind: inspect.Fenced}, []string{"jobs is a fenced lock: free."}},
		{"free lock with waiters", inspect.Object{Kind: inspect.Lock, Subscribers: 1}, []string{
			"jobs is a lock: free.",
			"PROBLEM: The lock was free for 10s although 1 connection listens to it. " +
				"Their processes may be stopped, or use another kind of lock under this name.",
		}},
		{"held lock with a waiter", inspect.Object{Kind: inspect.Lock, Held: true, Expires: ms(time.Second), Subscribers: 1}, []string{
			"jobs is a lock: held.",
			"1 connection listens to it.",
			"Its lease was not renewed for 10s: it is fixed, or its holder has died or stalls. The lock is free in 1s at the latest.",
		}},
		{"free fair lock with a queue", inspect.Object{Kind: inspect.Fair, Subscribers: 1, Queue: []inspect.Waiter{waiter, waiter}}, []string{
			"jobs is a fair lock: free.",
			"2 waiters are in its queue. w of redlatch is the first.",
			"That is process 7 on host web-3, connected from h:1 for 1m0s. It sent its last request 0s ago.",
			"PROBLEM: The lock was free for 10s, and its first waiter does not take it. " +
				"Others get the lock when the position of that waiter ends, in 8s.",
		}},
		{"waiting writers", inspect.Object{
			Kind: inspect.RWLock, Held: true, Waiting: 2, Expires: ms(time.Minute),
			Holders: []inspect.Holder{{Owner: inspect.Owner{ID: "r", Library: "other"}, Mode: "read", Lease: ms(time.Minute)}},
		}, []string{
			"jobs is a read-write lock: held for reading.",
			"r holds it to read; its lease ends in 1m0s.",
			"Its lease was not renewed for 10s, but so long a lease is renewed later: use --watch 25s to see that. " +
				"The lock is free in 1m0s at the latest, unless it is renewed.",
			"2 writers wait for the readers, so new readers of redlatch wait for them.",
		}},
		{"semaphore", inspect.Object{Kind: inspect.Semaphore, Permits: &inspect.PermitNumbers{Held: -1}, Waiting: 1, Subscribers: 1}, []string{
			"jobs is a semaphore: 0 free.",
			"1 client has waited for longer than 100 ms, and comes first.",
			"No permit was free for 10s: all are held, or the semaphore is drained, perhaps on purpose. " +
				"The server has no record of the holders of permits without ids. Find out which it is before you add " +
				`or release permits (see "redlatch permits --help"): that ends a drain.`,
		}},
		{"permits", inspect.Object{
			Kind: inspect.Semaphore, Held: true, Permits: &inspect.PermitNumbers{Held: 2},
			Holders: []inspect.Holder{{Lease: ms(9 * time.Second)}, {Lease: ms(3 * time.Second)}, {}},
		}, []string{
			"jobs is a semaphore: 0 free, 2 held.",
			"PROBLEM: 1 permit has no lease, as those of Redisson without one: if its process has died, only a release " +
				`by its id returns it (see "redlatch inspect" and "redlatch permits release").`,
			"No permit is free. The first lease ends in 3s, unless it is renewed.",
		}},
		{"free permits", inspect.Object{Kind: inspect.Semaphore, Permits: &inspect.PermitNumbers{Free: 2}, Subscribers: 1}, []string{
			"jobs is a semaphore: 2 free, 0 held.",
			"1 connection listens although 2 permits are free: a waiter may request more than that.",
		}},
		{"latch", inspect.Object{Kind: inspect.Latch, Count: new(int64(2)), Subscribers: 4, Expires: ms(time.Minute)}, []string{
			"The latch jobs opens after 2 more calls of CountDown.",
			"4 connections listen for that.",
			"It opens in 1m0s at the latest, when its key expires.",
		}},
		{"used up", inspect.Object{Kind: inspect.Rate, Limit: &inspect.Limit{
			Rate: 10, Per: inspect.Millis(time.Minute), Used: new(int64(10)), NextFree: ms(3 * time.Second),
		}}, []string{
			"The rate limiter jobs has given 10 of 10 permits.",
			"The first of them comes back in 3s, and all of them in 1m0s at the latest.",
		}},
		{"limit", inspect.Object{Kind: inspect.Rate, Limit: &inspect.Limit{Rate: 10, Per: inspect.Millis(time.Minute), Used: new(int64(3))}}, []string{
			"The rate limiter jobs has given 3 of 10 permits.",
		}},
		{"limit of each client", inspect.Object{Kind: inspect.Rate, Limit: &inspect.Limit{Rate: 10, Per: inspect.Millis(time.Minute), PerClient: true}}, []string{
			"The rate limiter jobs gives each client 10 permits per 1m0s. What each has used is in keys of its own.",
		}},
		{"last call", inspect.Object{Kind: inspect.Latch, Count: new(int64(1))}, []string{
			"The latch jobs opens after 1 more call of CountDown.",
		}},
		{"election", inspect.Object{Kind: inspect.Election}, []string{"jobs is an election: free."}},
		{"one waiter, one writer", inspect.Object{
			Kind: inspect.RWLock, Held: true, Waiting: 1, Expires: ms(time.Second), Queue: []inspect.Waiter{waiter},
		}, []string{
			"jobs is a read-write lock: held for reading.",
			"Its lease was not renewed for 10s: it is fixed, or its holder has died or stalls. The lock is free in 1s at the latest.",
			"1 writer waits for the readers, so new readers of redlatch wait for it.",
			"1 waiter is in its queue. w of redlatch is the first.",
			"That is process 7 on host web-3, connected from h:1 for 1m0s. It sent its last request 0s ago.",
		}},
		{"reduced permits", inspect.Object{
			Kind: inspect.Semaphore, Held: true, Permits: &inspect.PermitNumbers{Held: 3, Free: -1}, Holders: []inspect.Holder{{Lease: ms(time.Second)}},
		}, []string{
			"jobs is a semaphore: 0 free, 3 held, 1 too many.",
			"The number of permits was reduced to 2: no permit is free until 2 are released or end.",
		}},
		{"drained permits", inspect.Object{
			Kind: inspect.Semaphore, Held: true, Permits: &inspect.PermitNumbers{Held: 1, Free: -1}, Holders: []inspect.Holder{{Lease: ms(time.Second)}},
		}, []string{
			"jobs is a semaphore: 0 free, 1 held, 1 too many.",
			"The number of permits was reduced to 0: nobody acquires one until it is raised.",
		}},
		{"drained permits, none of which is held", inspect.Object{Kind: inspect.Semaphore, Permits: &inspect.PermitNumbers{}}, []string{
			"jobs is a semaphore: 0 free, 0 held.",
			"The number of permits was reduced to 0: nobody acquires one until it is raised.",
		}},
		{"open latch", inspect.Object{Kind: inspect.Latch, Count: new(int64(0))}, []string{"The latch jobs is open."}},
		{"counter", inspect.Object{Kind: inspect.Counter, Count: new(int64(3))}, []string{
			"jobs is the number 3, which may be a semaphore or a latch.",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.last.Name = "jobs"
			first := c.last
			c.last.At = first.At.Add(10 * time.Second)
			var out strings.Builder
			problems, err := printDiagnosis(&out, observation{first: first, last: c.last})
			require.NoError(t, err)
			require.Equal(t, strings.Join(c.want, "\n")+"\n", out.String())
			require.Equal(t, strings.Contains(out.String(), "PROBLEM"), problems)
		})
	}
}

// doctor watches a semaphore for as long as it is told, whatever happens meanwhile.
func TestDoctorWatchesASemaphore(t *testing.T) {
	const watch = 3 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		slots := harness.Client(t, s).PermitSemaphore("slots", semaphore.Permits(2))
		_, err := slots.Acquire(t.Context(), 1, lock.Lease(8*time.Second))
		require.NoError(t, err)
		permit, err := slots.Acquire(t.Context(), 1)
		require.NoError(t, err)

		conn := harness.Conn(t, s.Addr)
		r := &inspect.Reader{Conn: conn}
		before := harness.Commands(t, conn)["type"]
		watching := harness.Start(t, t.Context(), func(ctx context.Context) (observation, error) { return observe(ctx, r, "slots", watch) })
		harness.Eventually(t, patience, "doctor reads", func() bool { return harness.Commands(t, conn)["type"] > before })
		require.NoError(t, permit.Release(t.Context()))
		seen := watching.Got()
		require.GreaterOrEqual(t, seen.watched(), watch)
		var out strings.Builder
		problems, err := printDiagnosis(&out, seen)
		require.NoError(t, err)
		require.False(t, problems)
		require.Equal(t, `slots is a semaphore: 1 free, 1 held.
1 permit was held all the time, and its lease was not renewed for TIME: it is fixed, or its holder has died or stalls.
Permits changed hands while doctor watched: the semaphore is in use.
`, masked(out.String()))

		seen, err = observe(t.Context(), r, "nothing", time.Hour)
		require.NoError(t, err)
		require.Zero(t, seen.watched(), "there is nothing to watch")
	})
}

// JSON has the holders of an object, and null if they are unknown.
func TestHoldersInJSON(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		mustLock(t, c.Lock("lock"))
		_, err := c.CountDownLatch("latch").TrySetCount(t.Context(), 2)
		require.NoError(t, err)
		require.NoError(t, c.Semaphore("no ids", semaphore.Permits(3)).Acquire(t.Context(), 1))
		_, err = c.PermitSemaphore("ids", semaphore.Permits(3)).Acquire(t.Context(), 1, lock.Lease(time.Hour))
		require.NoError(t, err)
		harness.Do(t, s.Addr, "SET", "number", "3")
		harness.Do(t, s.Addr, "SET", "mutex", "t0ken", "PX", "60000")

		for _, row := range []struct{ name, want string }{
			{"lock", `{"held":true,"holders":[{}],"permits":null}`},
			{"latch", `{"held":false,"holders":[],"permits":null}`},
			{"no ids", `{"held":null,"holders":null,"permits":{"free":2,"held":null}}`},
			{"ids", `{"held":true,"holders":[{}],"permits":{"free":2,"held":1}}`},
			{"number", `{"held":null,"holders":null,"permits":null}`},
			{"mutex", `{"held":true,"holders":[{}],"permits":null}`},
			{"nothing", `{"held":false,"holders":[],"permits":null}`},
		} {
			outputs := []string{succeeds(t, s.Addr, "inspect", "--json", row.name)}
			if row.name != "nothing" && row.name != "mutex" { // whose value a list does not show
				outputs = append(outputs, succeeds(t, s.Addr, "ls", "--all", "--json", row.name))
			}
			for _, out := range outputs {
				var seen struct {
					Held    *bool      `json:"held"`
					Holders []struct{} `json:"holders"`
					Permits *struct {
						Free int  `json:"free"`
						Held *int `json:"held"`
					} `json:"permits"`
				}
				require.NoError(t, json.Unmarshal([]byte(out), &seen))
				got, err := json.Marshal(seen)
				require.NoError(t, err)
				require.Equal(t, row.want, string(got), "%s: %s", row.name, out)
			}
		}
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A semaphore has the same kind whether a permit is held or not.
func TestKindOfIdleSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		permit, err := harness.Client(t, s).PermitSemaphore("slots", semaphore.Permits(2)).Acquire(t.Context(), 1)
		require.NoError(t, err)
		require.Contains(t, succeeds(t, s.Addr, "ls", "--json"), `"kind":"semaphore"`)
		require.Contains(t, succeeds(t, s.Addr, "inspect", "slots"), "kind         semaphore\n")
		require.NoError(t, permit.Release(t.Context()))
		require.Contains(t, succeeds(t, s.Addr, "ls", "--json"), `"kind":"semaphore"`)
		require.Contains(t, succeeds(t, s.Addr, "inspect", "slots"), "kind         semaphore\n")
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// With --all, lists have what may be a lock of another library or a semaphore that nobody uses, and not its value.
func TestListOfAll(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "SET", "mutex:1", "s3cret", "PX", "60000")
		harness.Do(t, s.Addr, "SET", "mutex:2", strings.Repeat("long", 65), "PX", "60000")
		harness.Do(t, s.Addr, "SET", "mutex:3", "text")
		harness.Do(t, s.Addr, "SET", "mutex:4", "17")
		harness.Do(t, s.Addr, "HSET", "mutex:5", "1", "2")
		harness.Do(t, s.Addr, "SET", wire.FencingToken("orders"), "3")
		harness.Do(t, s.Addr, "SET", wire.LatchRound("import"), "text", "PX", "60000")
		const header, rest = "NAME KIND STATE EXPIRES WAITERS HOLDER\n", "orders fenced free - - -\n"
		require.Equal(t, header+"import latch open - - -\n"+rest, masked(succeeds(t, s.Addr, "ls")))
		require.Equal(t, header+"import latch open - - -\nmutex:1 plain - TIME - ?\nmutex:4 counter 17 - - ?\n"+rest,
			masked(succeeds(t, s.Addr, "ls", "--all")))
		out := succeeds(t, s.Addr, "ls", "--all", "--json", "mutex:1")
		require.Contains(t, out, `"held":null,"holders":null`)
		require.NotContains(t, out, "s3cret")

		from := samplerOf(t, s, "mutex:*")
		_, rows := take(t, from)
		require.Empty(t, rows)
		from = samplerOf(t, s, "mutex:*")
		from.all = true
		_, rows = take(t, from)
		require.Len(t, rows, 2)
		require.Nil(t, rows["mutex:1"].Holders)
		require.Equal(t, inspect.Counter, rows["mutex:4"].Kind)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A command that doctor advises means the same in a shell, whatever the name.
func TestAdvice(t *testing.T) {
	for _, name := range []string{"jobs", "x; touch pwned", "it's", "$(touch pwned)", "-x", "a\x1b[2J\xff\n'", "~", "#", "a b\\"} {
		for _, prefix := range []string{"", "app:", "my app:"} {
			slot := wire.OnceRun(name, "1")
			require.Equal(t, advice(inspect.Object{Name: slot, Key: prefix + slot}, "once forget"), advice(inspect.Object{
				Name: slot, Key: wire.OnceRun(prefix+name, "1"), Slot: &inspect.Slot{Work: name, Slot: "1"},
			}, "once forget"))
			text := advice(inspect.Object{Name: name, Key: prefix + name}, "unlock --force")
			require.Equal(t, text, printable(text))
			got := exec.Command("bash", "-c", `redlatch() { printf '%s\0' "$@"; }; `+text) //nolint:gosec // a test
			out, err := got.Output()
			require.NoError(t, err, text)
			want := []string{"unlock", "--force", name}
			if prefix != "" {
				want = append([]string{"--prefix", prefix}, want...)
			}
			args := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
			require.Equal(t, want, slices.DeleteFunc(args, func(arg string) bool { return arg == "--" }), text)
		}
	}
}

// An output that cannot be written is an error.
func TestFullOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	require.NoError(t, err)
	defer full.Close()
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, args := range []string{
			"doctor x", "inspect x", "ls", "unlock --force x", "latch set l 2", "latch down l", "latch delete l", "latch delete l",
			"permits set p 2", "permits drain p", "permits set --plain q 2", "permits drain --plain q", "permits release --plain q 2",
			"once ls", "once done o 1", "once done o 1", "once forget o 1", "once forget o 1",
		} {
			c := newCommand(t, s.Addr, strings.Fields(args)...)
			c.cmd.Stdout = full
			require.Error(t, c.cmd.Run(), args)
			require.Equal(t, statusFailed, c.cmd.ProcessState.ExitCode(), args)
			require.Contains(t, c.stderr.String(), "no space left on device", args)
		}
	})
}

// A reader that has seen enough, such as head, ends ls without a message.
func TestListForAReaderThatGoes(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r, w, err := os.Pipe()
		require.NoError(t, err)
		r.Close()
		defer w.Close()
		c := newCommand(t, s.Addr, "ls")
		c.cmd.Stdout = w
		require.Error(t, c.cmd.Run())
		require.Equal(t, syscall.SIGPIPE, c.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal())
		require.Empty(t, c.stderr.String())
	})
}

package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A contest is what many contenders do at the same time, some in processes with
// redlatch and some in processes with Redisson (see Contenders.java). The work is one
// of these:
//
//   - exclude: adds one to the counters that belong to a lock, not atomically
//   - share: reads or writes two counters that are only ever written together
//   - limit: takes a permit and counts how many are in use
//   - count: counts down and waits until all have
//
// They begin when all are there. They go on until all together have had the rounds
// there are, of which each is given to whoever asks; but with the work count every
// contender has every round. Half of them are named owners in Go, and half are
// asynchronous in Java.
type contest struct {
	Work   string `json:"work"`
	Rounds int    `json:"rounds"`
	Limit  int    `json:"limit"` // of permits
	// Contenders is how many each process has, and All how many there are.
	Contenders int `json:"contenders"`
	All        int `json:"all"`
	// Servers has the addresses of each server, or of the nodes of each cluster; on
	// the first the rounds are counted.
	Servers [][]string `json:"servers"`
	// Objects is what they contend for: the contenders of a process take them in turn.
	Objects []object `json:"objects"`
}

// object describes an object, or a lock that consists of others.
type object struct {
	Kind    string   `json:"kind"`
	Name    string   `json:"name"`
	At      int      `json:"at"` // which server
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

// names are those of the locks that are held by who holds the object.
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

// result is what became of the contenders of a process.
type result struct {
	Shares  []int `json:"shares"`  // the rounds of each
	Longest int64 `json:"longest"` // wait of all of them, in ms
}

// contendWorker takes part in the contest that its argument describes and prints its
// result.
func contendWorker(args []string) error {
	var c contest
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return err
	}
	ctx := context.Background()
	var clients []*redlatch.Client
	for _, addrs := range c.Servers {
		client, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: addrs})
		if err != nil {
			return err
		}
		defer client.Close()
		clients = append(clients, client)
	}
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: c.Servers[0], DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	type outcome struct {
		number, had int
		longest     time.Duration
		err         error
	}
	outcomes := make(chan outcome)
	for number := range c.Contenders {
		go func() {
			ctx := ctx
			if number%2 == 1 {
				ctx = lock.WithOwner(ctx, clients[0].NewOwner())
			}
			one := contender{c, c.Objects[number%len(c.Objects)], clients, conn}
			had, longest, err := one.contend(ctx)
			outcomes <- outcome{number, had, longest, err}
		}()
	}
	r := result{Shares: make([]int, c.Contenders)}
	for range c.Contenders {
		o := <-outcomes
		if o.err != nil {
			return o.err
		}
		r.Shares[o.number], r.Longest = o.had, max(r.Longest, o.longest.Milliseconds())
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// contender is one of the contenders of a process.
type contender struct {
	contest
	object  object
	clients []*redlatch.Client
	conn    rueidis.Client
}

func (c contender) number(ctx context.Context, words ...string) (int, error) {
	n, err := c.conn.Do(ctx, c.conn.B().Arbitrary(words[0]).Keys(words[1]).Args(words[2:]...).Build()).AsInt64()
	if rueidis.IsRedisNil(err) {
		return 0, nil
	}
	return int(n), err
}

// contend has rounds until there are no more. It returns how many, and the longest
// that it had to wait.
func (c contender) contend(ctx context.Context) (had int, longest time.Duration, err error) {
	n, err := c.number(ctx, "INCR", "ready")
	for n < c.All && err == nil {
		time.Sleep(time.Millisecond)
		n, err = c.number(ctx, "GET", "ready")
	}
	if err != nil {
		return 0, 0, err
	}
	for {
		if c.Work == "count" {
			if had == c.Rounds {
				return had, longest, nil
			}
		} else if n, err := c.number(ctx, "INCR", "tickets"); err != nil || n > c.Rounds {
			return had, longest, err
		}
		waited, err := c.round(ctx, had)
		if err != nil {
			return had, longest, err
		}
		had, longest = had+1, max(longest, waited)
	}
}

// round does the work once. It returns for how long it had to wait.
func (c contender) round(ctx context.Context, number int) (waited time.Duration, err error) {
	switch c.Work {
	case "exclude":
		return c.locked(ctx, c.object, func(ctx context.Context) error { return c.add(ctx, c.object.names()...) })
	case "share":
		o := c.object
		if rand.IntN(4) == 0 {
			o.Kind = "write"
			return c.locked(ctx, o, func(ctx context.Context) error {
				if err := c.add(ctx, "a", "b"); err != nil {
					return err
				}
				_, err := c.number(ctx, "INCR", "writes")
				return err
			})
		}
		o.Kind = "read"
		return c.locked(ctx, o, c.look)
	case "limit":
		return c.limited(ctx)
	case "count":
		return c.count(ctx, fmt.Sprint(c.object.Name, number))
	}
	return 0, fmt.Errorf("what is %s?", c.Work)
}

func (c contender) locked(ctx context.Context, o object, fn func(ctx context.Context) error) (waited time.Duration, err error) {
	begin := time.Now()
	err = o.lock(c.clients).Do(ctx, func(ctx context.Context) error {
		waited = time.Since(begin)
		return fn(ctx)
	})
	return waited, err
}

// add adds one to the numbers that belong to those names, which fails if anybody else
// does so meanwhile.
func (c contender) add(ctx context.Context, names ...string) error {
	for _, name := range names {
		n, err := c.number(ctx, "GET", "counter:"+name)
		if err != nil {
			return err
		}
		if err := c.conn.Do(ctx, c.conn.B().Set().Key("counter:"+name).Value(fmt.Sprint(n+1)).Build()).Error(); err != nil {
			return err
		}
	}
	return nil
}

// look fails if one number has been written and the other has not.
func (c contender) look(ctx context.Context) error {
	a, err := c.number(ctx, "GET", "counter:a")
	if err != nil {
		return err
	}
	b, err := c.number(ctx, "GET", "counter:b")
	if err == nil && a != b {
		err = fmt.Errorf("a reader saw %d and %d", a, b)
	}
	return err
}

func (c contender) limited(ctx context.Context) (waited time.Duration, err error) {
	begin := time.Now()
	var release func() error
	if c.object.Kind == "semaphore" {
		s := c.clients[0].Semaphore(c.object.Name)
		if err := s.Acquire(ctx, 1); err != nil {
			return 0, err
		}
		release = func() error { return s.Release(ctx, 1) }
	} else {
		permit, err := c.clients[0].PermitSemaphore(c.object.Name).Acquire(ctx)
		if err != nil {
			return 0, err
		}
		release = func() error { return permit.Release(ctx) }
	}
	waited = time.Since(begin)
	used, err := c.number(ctx, "INCR", "used")
	if err == nil && used > c.Limit {
		err = fmt.Errorf("%d permits are in use, of %d", used, c.Limit)
	}
	if err != nil {
		return waited, err
	}
	if _, err := c.number(ctx, "DECR", "used"); err != nil {
		return waited, err
	}
	return waited, release()
}

// count counts down and waits until all have.
func (c contender) count(ctx context.Context, name string) (waited time.Duration, err error) {
	if _, err := c.number(ctx, "INCR", "counted:"+name); err != nil {
		return 0, err
	}
	begin := time.Now()
	latch := c.clients[0].CountDownLatch(name)
	if _, err := latch.CountDown(ctx); err != nil {
		return 0, err
	}
	if err := latch.Wait(ctx); err != nil {
		return 0, err
	}
	waited = time.Since(begin)
	counted, err := c.number(ctx, "GET", "counted:"+name)
	if err == nil && counted != c.All {
		err = fmt.Errorf("the latch opened after %d of %d", counted, c.All)
	}
	return waited, err
}

// hold has so many processes of Go, and those of Java, contend, and returns the
// results: first those of Go. Nobody fails, nor waits for ever.
func (c contest) hold(t *testing.T, places []*place, gos int, javas []*jvm) []result {
	t.Helper()
	const d = 3 * time.Minute
	c.All = (gos + len(javas)) * c.Contenders
	for _, p := range places {
		c.Servers = append(c.Servers, p.addrs())
	}
	var calls []*call
	for _, j := range javas {
		var clients []*redisson
		for _, p := range places {
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

// TestContendersOfBothLanguages has two processes of Go and two of Java, with 16
// contenders each, contend for one object of each kind: it is exact, everybody gets
// in, and nothing is left.
func TestContendersOfBothLanguages(t *testing.T) {
	harness.Full(t)
	const contenders, limit = 16, 4
	second := spawnJVM(t, newest) // for the kinds that no other version has
	eachPlace(t, []string{newest}, func(t *testing.T, p *place) {
		full := !p.cluster && p.servers[0].Program == testserver.Redis
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
				results := c.hold(t, []*place{p}, 2, javas)
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
				if kind == "fenced" {
					require.Equal(t, rounds, number(t, "redisson_lock_token:{orders}"))
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

// nothingStays fails the test unless the servers soon keep nothing of a contest but
// its numbers, permits that are free, the last token, and what goes by itself.
func (p *place) nothingStays(t *testing.T) {
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

// nobodyStarves fails the test if a process, or a contender of Go, had much less than
// others. Whom Redisson serves is a matter of luck, but for fair locks. Spin locks are
// shared between processes by luck altogether, and not evenly: in Java each thread tries
// again, in Go one for all of the process, after pauses that grow. There everybody gets
// in.
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
	for _, r := range slices.Concat(ours, theirs) {
		require.Greater(t, sum(r.Shares)/len(r.Shares), equal/10, "a process")
	}
	for _, r := range ours { // first come, first served
		require.Greater(t, slices.Min(r.Shares), sum(r.Shares)/len(r.Shares)/2, "a contender of Go")
	}
	if strings.HasSuffix(kind, "fair") { // some begin a little later, or are stopped by their collector
		require.Less(t, slices.Max(all)-slices.Min(all), equal/4)
	}
}

func sum(of []int) (n int) {
	for _, i := range of {
		n += i
	}
	return n
}

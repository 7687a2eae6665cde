package contract_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/redlatchtest"
	"github.com/redlatch/redlatch/rlock"
	"github.com/redlatch/redlatch/semaphore"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// soon bounds what takes a few round trips, on a busy machine.
const soon = 10 * time.Second

// How soon a waiter looks without a reason: one in the line of a semaphore, a writer
// behind readers when it renews its sign, and any other.
const (
	linePoll   = 10 * time.Second / 3
	signPoll   = 2 * time.Second
	safetyPoll = 5 * time.Second
)

var quiet = redlatch.WithLogger(slog.New(slog.DiscardHandler))

type lockOf func(c *redlatch.Client, name string) lock.Locker

// kind is a row of the table: something that goroutines and processes hold.
type kind struct {
	name string
	// of returns the object of that name. It is a harness.Lock if owned is set.
	of lockOf
	// rival returns what nobody else holds at the same time.
	rival lockOf

	owned  bool // it knows its owners, and is a lock of one key
	leased bool // holds have a lease: they expire, are renewed, and can be lost
	shared bool // several hold it at once, but none beside a rival
	once   bool // an owner cannot hold it more than once
	polls  bool // waiters make attempts all the time
	tokens bool // holds have fencing tokens
	timed  bool // the end of a hold is stored beside the expiry of the key
	// memory is set if it is a redlatchtest.Locker, which is for tests that ask for it.
	memory bool

	// poll is how soon a waiter looks without a reason, if that is not the safety poll.
	poll time.Duration
	// free is the value of the key while nobody holds it. "" if there is no such key
	// then. Only who makes the object (see prepare) writes it.
	free string
	// held is the format of the key that is there while somebody holds it, "" for the name.
	held string
	// stored is the command that makes somebody hold the object "orders", without a lease.
	stored []string
	// stays is the format of a further key that outlives the last hold.
	stays string
	// cached is the format of a pattern for keys that expire soon.
	cached string
}

// somebody is the owner of a hold that no client knows of.
const somebody = "018f4c3a-1111-7000-8000-000000000001:1"

// ownedKind returns a lock that is a hash of owners, of which one holds it.
func ownedKind(name string, of lockOf) kind {
	return kind{name: name, of: of, rival: of, owned: true, leased: true, stored: []string{"HSET", "orders", somebody, "1"}}
}

func polling(k kind) kind {
	k.polls = true
	return k
}

func onceOnly(k kind) kind {
	k.once = true
	return k
}

func reading(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Read() }
func writing(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() }
func plain(c *redlatch.Client, name string) lock.Locker   { return c.PlainLock(name) }

func grouped(c *redlatch.Client, name string) lock.Locker { return c.GroupLock(name, "a", "b") }

// regrouped is grouped, in other words.
func regrouped(c *redlatch.Client, name string) lock.Locker { return c.GroupLock(name, "b", "a", "b") }

// somebodyHas returns the command that gives somebody the value "b" of the group "orders", without a lease that ends soon.
func somebodyHas() []string {
	const b = "Q5CdP+xmkHdTGWYr64Lw6A"
	return []string{"HSET", "orders", b, somebody, b + ":" + somebody + ":expire_time", "9999999999999", b + ":" + somebody + ":lock_count", "1"}
}

// multi holds two members with one script, and a third with another.
func multi(c *redlatch.Client, name string) lock.Locker {
	return c.MultiLock(c.Lock(name), c.Lock(name+" 2"), c.FairLock(name+" 3"))
}

// red is a majority of one: the package multilock tests those of several servers. A server
// that is slow, since the machine is busy, is not away.
func red(c *redlatch.Client, name string) lock.Locker {
	return c.RedLock([]lock.Locker{c.Lock(name)}, multilock.Timeout(10*time.Second))
}

func permit(c *redlatch.Client, name string) lock.Locker {
	return permits{c.PermitSemaphore(name)}
}

func number(c *redlatch.Client, name string) lock.Locker {
	return numbered{c.Semaphore(name)}
}

func candidacy(c *redlatch.Client, name string) lock.Locker {
	return candidates{c.Election(name)}
}

func latch(c *redlatch.Client, name string) lock.Locker {
	return latched{c.CountDownLatch(name)}
}

var kinds = []kind{
	ownedKind("lock", func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) }),
	onceOnly(ownedKind("non-reentrant", func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name, rlock.NonReentrant()) })),
	fenced(ownedKind("fenced", func(c *redlatch.Client, name string) lock.Locker { return c.FencedLock(name) })),
	polling(ownedKind("spin", func(c *redlatch.Client, name string) lock.Locker { return c.SpinLock(name) })),
	ownedKind("fair", func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) }),
	onceOnly(ownedKind("non-reentrant fair", func(c *redlatch.Client, name string) lock.Locker {
		return c.FairLock(name, fairlock.NonReentrant())
	})),
	{
		name: "read", of: reading, rival: writing, owned: true, leased: true, shared: true,
		stored: []string{"HSET", "orders", "mode", "read", somebody, "1"},
	},
	{
		name: "write", of: writing, rival: writing, owned: true, leased: true,
		stored: []string{"HSET", "orders", "mode", "write", somebody + ":write", "1"},
	},
	{name: "plain", of: plain, rival: plain, owned: true, leased: true, once: true, stored: []string{"SET", "orders", "somebody"}},
	{name: "group", of: grouped, rival: regrouped, owned: true, leased: true, timed: true, stored: somebodyHas()},
	{name: "multi", of: multi, rival: multi, leased: true, stored: []string{"HSET", "orders", somebody, "1"}},
	{name: "red", of: red, rival: red, leased: true, once: true, polls: true, stored: []string{"HSET", "orders", somebody, "1"}},
	{
		name: "election", of: candidacy, rival: candidacy, leased: true, once: true, tokens: true,
		stored: []string{"HSET", "orders", somebody, "1"}, stays: "redlatch_election:{%s}",
	},
	{name: "permit semaphore", of: permit, rival: permit, leased: true, once: true, poll: linePoll, free: "1", held: "{%s}:timeout", stored: []string{"SET", "orders", "0"}},
	{name: "semaphore", of: number, rival: number, once: true, poll: linePoll, free: "1", stored: []string{"SET", "orders", "0"}},
	{name: "latch", of: latch, rival: latch, once: true, stored: []string{"SET", "orders", "1"}, cached: "redlatch_latch_round:{%s}:*"},
}

func inMemory() kind {
	var lockers sync.Map
	of := func(_ *redlatch.Client, name string) lock.Locker {
		l, _ := lockers.LoadOrStore(name, redlatchtest.NewLocker(name))
		return l.(lock.Locker)
	}
	return kind{name: "in memory", of: of, rival: of, leased: true, tokens: true, memory: true}
}

func fenced(k kind) kind {
	k.stays, k.tokens = "redisson_lock_token:{%s}", true
	return k
}

func ofKind(name string) kind {
	return kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })]
}

func (k kind) lock(c *redlatch.Client, name string) harness.Lock { return k.of(c, name).(harness.Lock) }

func (k kind) rivalLock(c *redlatch.Client, name string) harness.Lock {
	return k.rival(c, name).(harness.Lock)
}

// long returns the option for a hold that lasts and is not renewed, if there are such.
func (k kind) long() []lock.Option {
	if !k.leased {
		return nil
	}
	return []lock.Option{lock.Lease(time.Hour)}
}

// key returns the key that is there while somebody holds the object of that name.
func (k kind) key(name string) string {
	if k.held == "" {
		return name
	}
	return fmt.Sprintf(k.held, name)
}

// prepare makes objects that do not come into being with their first holder, unless they
// are there.
func (k kind) prepare(t testing.TB, addr string, names ...string) {
	t.Helper()
	if k.free == "" {
		return
	}
	for _, name := range names {
		harness.Do(t, addr, "SET", name, k.free, "NX")
	}
}

// unmake fails the test unless nobody holds the objects of these names, and removes what
// is meant to be left of them.
func (k kind) unmake(t testing.TB, addr string, names ...string) {
	t.Helper()
	for _, name := range names {
		if k.free != "" {
			harness.Eventually(t, 2*soon, "all permits of the "+k.name+" are back", func() bool {
				value, err := testserver.Query(addr, "GET", name)
				return err == nil && value[0] == k.free
			})
			harness.Do(t, addr, "DEL", name)
		}
		if k.stays != "" {
			harness.Do(t, addr, "DEL", fmt.Sprintf(k.stays, name))
		}
		if k.cached != "" {
			keys, err := testserver.Query(addr, "KEYS", fmt.Sprintf(k.cached, name))
			require.NoError(t, err)
			for _, key := range keys {
				require.NotEqualValues(t, -1, harness.PTTL(t, addr, key), key)
				harness.Do(t, addr, "DEL", key)
			}
		}
	}
}

// forgotten has the server forget everything, the hold of ctx included. "orders" is prepared again.
func (k kind) forgotten(t testing.TB, addr string, ctx context.Context) {
	t.Helper()
	if k.memory {
		redlatchtest.Lose(t, ctx, lock.ReasonGone)
		return
	}
	harness.Do(t, addr, "FLUSHALL")
	k.prepare(t, addr, "orders")
}

// choose returns the rows of the kinds that are wanted.
func choose(wanted func(kind) bool) (rows []kind) {
	for _, k := range append(slices.Clone(kinds), inMemory()) {
		if wanted(k) {
			rows = append(rows, k)
		}
	}
	return rows
}

// all, and what follows, are for choose.
func all(k kind) bool       { return !k.memory }
func owned(k kind) bool     { return k.owned }
func leased(k kind) bool    { return k.leased && !k.memory }
func reentrant(k kind) bool { return k.owned && !k.once }

// andInMemory adds the lock in memory to the kinds that are wanted.
func andInMemory(wanted func(kind) bool) func(kind) bool {
	return func(k kind) bool { return k.memory || wanted(k) }
}

// eachKind runs a test for every kind that is asked for, on every server program, all in
// parallel, each on an empty server of its own. The object "orders" is prepared; if the
// test has passed, nobody may hold it, nor may anything else be left.
func eachKind(t *testing.T, wanted func(kind) bool, test func(t *testing.T, s *testserver.Server, k kind)) {
	t.Helper()
	harness.EachOf(t, choose(wanted), func(k kind) string { return k.name }, func(t *testing.T, s *testserver.Server, k kind) {
		if k.memory {
			k = inMemory() // on each server
		}
		k.prepare(t, s.Addr, "orders")
		test(t, s, k)
		k.unmake(t, s.Addr, "orders")
		if k.owned {
			harness.NothingLeft(t, s.Addr)
		} else {
			harness.NothingStays(t, s.Addr)
		}
	})
}

// eachVirtually is eachKind in virtual time, on an embedded server: it is for tests whose
// subject is time.
func eachVirtually(t *testing.T, wanted func(kind) bool, test func(t *testing.T, s *harness.VirtualServer, k kind)) {
	t.Helper()
	t.Parallel()
	for _, k := range choose(wanted) {
		t.Run(k.name, func(t *testing.T) { virtually(t, k, test) })
	}
}

func virtually(t *testing.T, k kind, test func(t *testing.T, s *harness.VirtualServer, k kind)) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		k.prepareIn(s, "orders")
		test(t, s, k)
		time.Sleep(13 * time.Minute) // cached replies of a semaphore last 12
		synctest.Wait()
		for _, key := range s.Keys() {
			if k.free != "" {
				free, err := s.Get(key)
				require.NoError(t, err)
				require.Equal(t, k.free, free, key)
			} else {
				require.Regexp(t, "^"+regexp.QuoteMeta(strings.Split(k.stays, "%s")[0])+".", key)
			}
		}
	})
}

// prepareIn is prepare for an embedded server.
func (k kind) prepareIn(s *harness.VirtualServer, names ...string) {
	for _, name := range names {
		if k.free != "" && !s.Exists(name) {
			_ = s.Set(name, k.free)
		}
	}
}

// together runs a test for every kind that is asked for, all at the same time on one
// server: it is for tests that wait. The name of each object is that of its kind. Objects
// are prepared; if the test has passed, nobody may hold them, nor may anything be left.
func together(t *testing.T, s *testserver.Server, wanted func(kind) bool, test func(t *testing.T, k kind)) {
	t.Helper()
	var wg sync.WaitGroup
	for _, k := range choose(wanted) {
		k.prepare(t, s.Addr, k.name)
		wg.Go(func() { t.Run(k.name, func(t *testing.T) { test(t, k) }) })
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for _, k := range choose(wanted) {
		k.unmake(t, s.Addr, k.name)
	}
	harness.NothingStays(t, s.Addr)
}

// owners are contexts of an owner made for each acquisition and of one with a name. The
// latter is left out for kinds that know no owners.
func (k kind) owners(t testing.TB, c *redlatch.Client) map[string]context.Context {
	ctxs := map[string]context.Context{"unnamed": t.Context()}
	if k.owned || k.memory {
		ctxs["named"] = lock.WithOwner(t.Context(), c.NewOwner())
	}
	return ctxs
}

// barrier is where the tests that run together meet before something happens to all.
type barrier struct {
	missing sync.WaitGroup
	over    chan struct{}
}

// barrierOf returns a barrier of n tests. What then does happens once, when all have
// arrived. It must not end a test.
func barrierOf(n int, then func()) *barrier {
	b := &barrier{over: make(chan struct{})}
	b.missing.Add(n)
	go func() {
		defer close(b.over)
		b.missing.Wait()
		then()
	}()
	return b
}

// join returns how a test says that it has arrived, and waits. If the test fails before,
// nobody waits for it.
func (b *barrier) join(t *testing.T) (meet func()) {
	arrive := sync.OnceFunc(b.missing.Done)
	t.Cleanup(arrive)
	return func() {
		arrive()
		<-b.over
	}
}

type calls map[string]func(ctx context.Context) error

// looks returns calls of the methods that change nothing.
func looks(l lock.Locker, o lock.Owner) calls {
	all := calls{}
	if l, ok := l.(harness.Lock); ok {
		all["IsLocked"] = func(ctx context.Context) error { return only(l.IsLocked(ctx)) }
		all["HoldCount"] = func(ctx context.Context) error { return only(l.HoldCount(ctx, o)) }
		all["TTL"] = func(ctx context.Context) error { return only(l.TTL(ctx)) }
	}
	if l, ok := l.(interface {
		Available(context.Context) (int, error)
	}); ok {
		all["Available"] = func(ctx context.Context) error { return only(l.Available(ctx)) }
	}
	if l, ok := l.(candidates); ok {
		all["Leader"] = func(ctx context.Context) error { return only(l.Leader(ctx)) }
	}
	if l, ok := l.(latched); ok {
		all["Count"] = func(ctx context.Context) error { return only(l.Count(ctx)) }
	}
	return all
}

func nothing(context.Context) error { return nil }

func only(_ any, err error) error { return err }

func mustLock(t testing.TB, ctx context.Context, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(ctx, opts...)
	require.NoError(t, err)
	return h
}

// isTaken fails the test unless an attempt of a new owner finds the object taken.
func isTaken(t testing.TB, l lock.Locker) {
	t.Helper()
	_, err := l.TryLock(t.Context())
	require.ErrorIs(t, err, lock.ErrNotAcquired)
}

// waiting reports whether n callers of that client wait for objects of this kind, and none
// of them makes an attempt.
func (k kind) waiting(n int, c *redlatch.Client) bool {
	stats := c.Stats()
	hub := stats.PubSub
	switch {
	case k.memory:
		return k.of(c, "orders").(*redlatchtest.Locker).Waiting() == n
	case k.polls:
		return stats.Waiting+stats.Attempting == n
	case k.name == "latch": // whose waiters share everything
		return (hub.Listeners > 0) == (n > 0) && hub.Subscribed == hub.Channels && stats.Background == 0
	default:
		return harness.Waiting(n, c)
	}
}

// waits takes an object of that client in the background and gives it back. It returns
// when that has to wait. Nobody else of that client may wait.
func (k kind) waits(t testing.TB, l lock.Locker, c *redlatch.Client) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- l.Do(context.Background(), nothing) }()
	harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
	return done
}

func getsIn(t testing.TB, waiter <-chan error) {
	t.Helper()
	require.NoError(t, ends(t, waiter, 3*time.Second))
}

func ends(t testing.TB, done <-chan error, d time.Duration) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(d):
		require.FailNow(t, fmt.Sprintf("a call does not end within %v", d))
		return nil
	}
}

func async(call func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	return done
}

// What follows makes Lockers of what is used like one.

// permits is a semaphore whose only permit is held as a lock is.
type permits struct{ *semaphore.PermitSemaphore }

func (p permits) hold(permit *semaphore.Permit, err error) (lock.Hold, error) {
	if err != nil {
		return nil, err
	}
	return permitHold{permit}, nil
}

func (p permits) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return p.hold(p.Acquire(ctx, 1, opts...))
}

func (p permits) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return p.hold(p.TryAcquire(ctx, 1, opts...))
}

func (p permits) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error) {
	return p.hold(p.PermitSemaphore.Adopt(ctx, id, opts...))
}

func (p permits) Do(ctx context.Context, fn func(context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, p, fn, opts...)
}

type permitHold struct{ *semaphore.Permit }

func (permitHold) Owner() lock.Owner                  { return lock.Owner{} }
func (permitHold) Token() int64                       { return 0 }
func (h permitHold) Unlock(ctx context.Context) error { return h.Release(ctx) }

// candidates is an election whose terms are held as a lock is.
type candidates struct{ *election.Election }

func (c candidates) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	term, err := c.Campaign(ctx, "", opts...)
	if err != nil {
		return nil, err
	}
	return termHold{term, c.Name()}, nil
}

func (c candidates) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return c.Lock(ctx, append(harness.Options(opts), lock.Wait(0))...)
}

func (c candidates) Do(ctx context.Context, fn func(context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, c, fn, opts...)
}

type termHold struct {
	*election.Term
	name string
}

func (h termHold) Name() string                     { return h.name }
func (h termHold) Unlock(ctx context.Context) error { return h.Resign(ctx) }
func (termHold) Detach(context.Context, time.Duration) (string, error) {
	return "", lock.ErrUnsupported
}

// numbered is a semaphore whose only permit has neither a lease nor an identity.
type numbered struct{ *semaphore.Semaphore }

func (n numbered) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	wait := make([]lock.WaitOption, len(opts))
	for i, opt := range opts {
		wait[i] = opt.(lock.WaitOption)
	}
	if err := n.Acquire(ctx, 1, wait...); err != nil {
		return nil, err
	}
	return bareHold{name: n.Name(), ctx: ctx, unlock: func(ctx context.Context) error { return n.Release(ctx, 1) }}, nil
}

func (n numbered) TryLock(ctx context.Context, _ ...lock.HoldOption) (lock.Hold, error) {
	if err := n.TryAcquire(ctx, 1); err != nil {
		return nil, err
	}
	return bareHold{name: n.Name(), ctx: ctx, unlock: func(ctx context.Context) error { return n.Release(ctx, 1) }}, nil
}

func (n numbered) Do(ctx context.Context, fn func(context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, n, fn, opts...)
}

// latched is a latch that excludes: who sets its count is inside, and counts down when
// it leaves. All others wait at the latch.
type latched struct{ *countdown.Latch }

func (l latched) TryLock(ctx context.Context, _ ...lock.HoldOption) (lock.Hold, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	// A count whose setting is called off may be set, and nobody would count down.
	set, err := l.TrySetCount(context.WithoutCancel(ctx), 1)
	if err == nil && !set {
		err = lock.ErrNotAcquired
	}
	if err != nil {
		return nil, err
	}
	return bareHold{name: l.Name(), ctx: ctx, unlock: func(ctx context.Context) error { return only(l.CountDown(ctx)) }}, nil
}

func (l latched) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	waiting := ctx
	if o.Bounded {
		bounded, cancel := context.WithTimeoutCause(ctx, o.Wait, lock.ErrNotAcquired)
		defer cancel()
		waiting = bounded
	}
	for {
		h, err := l.TryLock(ctx)
		if !errors.Is(err, lock.ErrNotAcquired) {
			return h, err
		}
		if err := l.Wait(waiting); err != nil {
			return nil, err
		}
	}
}

func (l latched) Do(ctx context.Context, fn func(context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, l, fn, opts...)
}

type bareHold struct {
	lock.Hold
	name   string
	ctx    context.Context // that of the acquisition
	unlock func(ctx context.Context) error
}

func (h bareHold) Name() string                     { return h.name }
func (h bareHold) Context() context.Context         { return h.ctx }
func (h bareHold) Unlock(ctx context.Context) error { return h.unlock(ctx) }

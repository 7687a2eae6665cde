//go:build linux

package etcdlock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
	"github.com/redlatch/redlatch/lock/locktest"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]func([]string) error{"holder": holder, "writer": writer})
}

// slack is for pauses of the process.
const slack = 500 * time.Millisecond

// ttl is the TTL in tests that lose leases. etcd looks for expired leases each half second.
const ttl = 3 * time.Second

// expiry is how soon others have what a silent client had, at most.
const expiry = ttl + 2*time.Second

// locks returns a client with a client of etcd of its own. The end of the test closes both.
func locks(t testing.TB, addrs []string, opts ...etcdlock.Option) *etcdlock.Client {
	t.Helper()
	return locksOf(t, connect(t, addrs...), opts...)
}

func locksOf(t testing.TB, etcd *clientv3.Client, opts ...etcdlock.Option) *etcdlock.Client {
	t.Helper()
	c, err := etcdlock.New(t.Context(), etcd, append([]etcdlock.Option{etcdlock.WithTTL(ttl)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// onClient is the work of a process that has a client.
func onClient(addrs []string, work func(ctx context.Context, etcd *clientv3.Client, c *etcdlock.Client) error) error {
	etcd, err := clientv3.New(clientv3.Config{Endpoints: addrs, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer etcd.Close()
	ctx := context.Background()
	c, err := etcdlock.New(ctx, etcd, etcdlock.WithTTL(ttl))
	if err != nil {
		return err
	}
	defer c.Close()
	return work(ctx, etcd, c)
}

// claims returns the claims of a name that exist.
func claims(t testing.TB, etcd *clientv3.Client, name string) []*mvccpb.KeyValue {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*bound)
	defer cancel()
	resp, err := etcd.Get(ctx, "redlatch/"+name+",", clientv3.WithPrefix())
	require.NoError(t, err)
	return resp.Kvs
}

// left returns the keys of a name that exist.
func left(t testing.TB, etcd *clientv3.Client, name string) (keys []string) {
	t.Helper()
	for _, kv := range claims(t, etcd, name) {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

// leaseOf returns the lease of the only claim of a name.
func leaseOf(t testing.TB, etcd *clientv3.Client, name string) clientv3.LeaseID {
	t.Helper()
	kvs := claims(t, etcd, name)
	require.Len(t, kvs, 1)
	return clientv3.LeaseID(kvs[0].Lease)
}

// nothingLeft waits until no key of a name exists.
func nothingLeft(t testing.TB, etcd *clientv3.Client, name string) {
	t.Helper()
	nothingLeftWithin(t, etcd, name, bound)
}

func nothingLeftWithin(t testing.TB, etcd *clientv3.Client, name string, d time.Duration) {
	t.Helper()
	harness.Eventually(t, d, "no key of "+name+" is left", func() bool { return len(left(t, etcd, name)) == 0 })
}

// waiting waits until n claims of a name exist.
func waiting(t testing.TB, etcd *clientv3.Client, name string, n int) {
	t.Helper()
	harness.Eventually(t, bound, "the calls wait", func() bool { return len(left(t, etcd, name)) == n })
}

// lost waits for the loss of a hold.
func lost(t testing.TB, h lock.Hold, within time.Duration, reason lock.Reason) {
	t.Helper()
	harness.Receive(t, within, "the loss", h.Context().Done())
	var loss *lock.LostError
	require.ErrorAs(t, context.Cause(h.Context()), &loss)
	assert.Equal(t, reason, loss.Reason, "%v", loss)
	assert.ErrorIs(t, h.Unlock(context.Background()), lock.ErrLost)
}

// suiteClient is a client of the conformance suite, behind a proxy of its own.
type suiteClient struct {
	*etcdlock.Client
	proxy *testserver.Proxy
	lock  func(c *etcdlock.Client, name string) lock.Locker
}

func (c suiteClient) Lock(name string) lock.Locker { return c.lock(c.Client, name) }

// conform runs the conformance suite.
func conform(t *testing.T, s locktest.Suite, of func(c *etcdlock.Client, name string) lock.Locker) {
	addr := shared(t)
	watcher := connect(t, addr)
	s.NewClient = func(t testing.TB) locktest.Client {
		p := testserver.NewProxy(t, addr)
		return suiteClient{locks(t, []string{p.Addr}), p, of}
	}
	s.Fenced = true
	s.Fair = true
	s.Leased = true
	s.Extends = true
	s.Closes = true
	s.Expires = true
	s.Settle = 200 * time.Millisecond
	s.Expiry = expiry
	s.CutOff = func(_ testing.TB, c locktest.Client) func() {
		p := c.(suiteClient).proxy
		p.Down()
		return func() { p.Set(testserver.Pass) }
	}
	s.Open = func(t testing.TB, name string) {
		for _, key := range left(t, watcher, name) {
			_, err := watcher.Delete(t.Context(), key)
			require.NoError(t, err)
		}
	}
	s.Left = func(t testing.TB, name string) []string { return left(t, watcher, name) }
	locktest.Run(t, s)
}

func TestConformance(t *testing.T) {
	t.Parallel()
	rw := func(c locktest.Client, name string) (read, write lock.Locker) {
		rw := c.(suiteClient).RWLock(name)
		return rw.Read(), rw.Write()
	}
	permits := func(c locktest.Client, name string, n int) lock.Locker { return c.(suiteClient).Semaphore(name, n) }
	t.Run("lock", func(t *testing.T) {
		conform(t, locktest.Suite{Kind: "etcd", Reentrant: true, AtLeast: true, RWLock: rw, Semaphore: permits},
			func(c *etcdlock.Client, name string) lock.Locker { return c.Client.Lock(name) })
	})
	t.Run("semaphore", func(t *testing.T) {
		conform(t, locktest.Suite{Kind: "etcd-semaphore"},
			func(c *etcdlock.Client, name string) lock.Locker { return c.Semaphore(name, 1) })
	})
	t.Run("read", func(t *testing.T) {
		conform(t, locktest.Suite{
			Kind: "etcd-", Reentrant: true,
			Rival: func(c locktest.Client, name string) lock.Locker { return c.(suiteClient).RWLock(name).Write() },
		}, func(c *etcdlock.Client, name string) lock.Locker { return c.RWLock(name).Read() })
	})
}

// A name is not a prefix of another, whatever it contains.
func TestNames(t *testing.T) {
	t.Parallel()
	c := locks(t, []string{shared(t)})
	names := []string{"names/w", "names/", "names", "names%2Fw", "names/w-1", "names,", "names,w-1", "names\x00", "names\xff", "námes", "names names", "/names"}
	var holds []lock.Hold
	for _, name := range names {
		h, err := c.Lock(name).TryLock(t.Context())
		require.NoError(t, err, "%q", name)
		p, err := c.Semaphore(name, 1).TryLock(t.Context())
		require.NoError(t, err, "%q", name)
		holds = append(holds, h, p)
	}
	for _, name := range names {
		_, err := c.Lock(name).TryLock(t.Context())
		assert.ErrorIs(t, err, lock.ErrNotAcquired, "%q", name)
	}
	for _, h := range holds {
		assert.NoError(t, h.Unlock(t.Context()))
	}

	_, err := c.Lock(strings.Repeat("x", 4097)).TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrInvalid)
	h, err := c.Lock(strings.Repeat("/", 4096)).TryLock(t.Context())
	require.NoError(t, err)
	assert.NoError(t, h.Unlock(t.Context()))
}

// Invalid options, and an etcd that cannot be reached, are errors of New.
func TestNew(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	for name, opts := range map[string][]etcdlock.Option{
		"nil":   {nil},
		"short": {etcdlock.WithTTL(time.Second)},
		"long":  {etcdlock.WithTTL(2 * time.Hour)},
		"comma": {etcdlock.WithPrefix("a,b/")},
		"slash": {etcdlock.WithPrefix("a")},
	} {
		_, err := etcdlock.New(t.Context(), etcd, opts...)
		assert.ErrorIs(t, err, lock.ErrInvalid, name)
	}
	_, err := etcdlock.New(t.Context(), nil)
	assert.ErrorIs(t, err, lock.ErrInvalid)

	c := locksOf(t, etcd, etcdlock.WithDriver(driver.WithLogger(nil)))
	_, err = c.Lock("new").TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrInvalid)

	p := testserver.NewProxy(t, shared(t))
	p.Down()
	began := time.Now()
	_, err = etcdlock.New(t.Context(), connect(t, p.Addr))
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	assert.Less(t, time.Since(began), bound)
	p.Set(testserver.Stall)
	began = time.Now()
	_, err = etcdlock.New(t.Context(), connect(t, p.Addr))
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	assert.Less(t, time.Since(began), 2*time.Second+slack, "the timeout of a request")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = etcdlock.New(ctx, connect(t, p.Addr))
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
}

// Clients with different prefixes have different locks, also if one prefix begins with the other.
func TestPrefix(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	outer := locksOf(t, etcd, etcdlock.WithPrefix("prefix/"))
	inner := locksOf(t, etcd, etcdlock.WithPrefix("prefix/name/"))
	root := locksOf(t, etcd, etcdlock.WithPrefix(""))
	taken := func(l lock.Locker) {
		t.Helper()
		h, err := l.TryLock(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, h.Unlock(context.Background())) })
	}
	for _, name := range []string{"report", "write", "permit"} { // the kinds of keys have the same first letters
		taken(inner.Lock(name))
		taken(inner.Semaphore(name, 1))
	}
	for _, c := range []*etcdlock.Client{outer, root} {
		for _, name := range []string{"name", "prefix", "prefix/name"} {
			taken(c.Lock(name))
			taken(c.Semaphore(name, 1))
		}
	}
	keys, err := etcd.Get(t.Context(), "prefix/name,", clientv3.WithPrefix())
	require.NoError(t, err)
	assert.Len(t, keys.Kvs, 2)
}

// A reader does not overtake a writer that waits, and tries nothing while one does.
func TestWriterFirst(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	rw := c.RWLock("writer-first")
	first, err := rw.Read().Lock(t.Context())
	require.NoError(t, err)
	second, err := rw.Read().TryLock(t.Context())
	require.NoError(t, err)
	writer := harness.StartLock(t, t.Context(), rw.Write())
	waiting(t, etcd, "writer-first", 3)
	_, err = rw.Read().TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrNotAcquired)
	reader := harness.StartLock(t, t.Context(), rw.Read())
	waiting(t, etcd, "writer-first", 4)

	require.NoError(t, first.Unlock(t.Context()))
	assert.True(t, writer.Running())
	require.NoError(t, second.Unlock(t.Context()))
	w := writer.Got()
	assert.True(t, reader.Running())
	assert.Greater(t, w.Token(), second.Token())
	require.NoError(t, w.Unlock(t.Context()))
	r := reader.Got()
	assert.Greater(t, r.Token(), w.Token())
	require.NoError(t, r.Unlock(t.Context()))
	nothingLeft(t, etcd, "writer-first")
}

// The permits of a semaphore go to those who came first, and TryLock does not queue.
func TestPermits(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	s := c.Semaphore("permits", 3)
	var holds []lock.Hold
	for range 3 {
		h, err := s.TryLock(t.Context())
		require.NoError(t, err)
		holds = append(holds, h)
	}
	_, err := s.TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrNotAcquired)
	assert.Len(t, left(t, etcd, "permits"), 3)

	var calls []*harness.Call[lock.Hold]
	for i := range 4 {
		calls = append(calls, harness.StartLock(t, t.Context(), s))
		waiting(t, etcd, "permits", 4+i)
	}
	slices.Reverse(holds)
	for i, call := range calls[:3] {
		assert.True(t, call.Running())
		require.NoError(t, holds[i].Unlock(t.Context()))
		holds = append(holds, call.Got())
	}
	calls[3].Leave()
	waiting(t, etcd, "permits", 3)
	for _, h := range holds[3:] {
		require.NoError(t, h.Unlock(t.Context()))
	}
	nothingLeft(t, etcd, "permits")
}

// However many try at once, no more hold a semaphore than it has permits, and all permits are taken.
func TestManyTry(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	var clients []*etcdlock.Client
	for range 3 {
		clients = append(clients, locks(t, []string{shared(t)}))
	}
	for round := range 5 {
		name := fmt.Sprintf("many-try-%d", round)
		var mu sync.Mutex
		var holds []lock.Hold
		var work sync.WaitGroup
		for i := range 24 {
			work.Go(func() {
				h, err := clients[i%3].Semaphore(name, 5).TryLock(t.Context())
				if err != nil {
					assert.ErrorIs(t, err, lock.ErrNotAcquired)
					return
				}
				mu.Lock()
				holds = append(holds, h)
				mu.Unlock()
			})
		}
		work.Wait()
		assert.Len(t, holds, 5)
		for _, h := range holds {
			require.NoError(t, h.Unlock(t.Context()))
		}
		nothingLeft(t, etcd, name)
	}
}

// etcd gets no new key for each hold: it remembers keys that are deleted.
func TestSlots(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	keys := make(map[string]bool)
	l := c.Lock("slots")
	for range 20 {
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		next := harness.StartLock(t, t.Context(), l)
		waiting(t, etcd, "slots", 2)
		gone := harness.StartLock(t, t.Context(), l)
		waiting(t, etcd, "slots", 3)
		gone.Leave()
		waiting(t, etcd, "slots", 2)
		for _, key := range left(t, etcd, "slots") {
			keys[key] = true
		}
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, next.Got().Unlock(t.Context()))
	}
	assert.LessOrEqual(t, len(keys), 4, "%v", keys)
}

// A transaction with IsOwner succeeds while the lock is held, and not when it was lost or unlocked.
func TestIsOwner(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	write := func(condition clientv3.Cmp) bool {
		resp, err := etcd.Txn(t.Context()).If(condition).Then(clientv3.OpPut("is-owner-data", "x")).Commit()
		require.NoError(t, err)
		return resp.Succeeded
	}
	h, err := c.Lock("is-owner").Lock(t.Context())
	require.NoError(t, err)
	early := c.IsOwner(h)
	assert.True(t, write(early))
	require.NoError(t, h.Extend(t.Context(), time.Minute))
	assert.True(t, write(c.IsOwner(h)), "after Extend")
	assert.True(t, write(early), "after Extend")
	require.NoError(t, h.Unlock(t.Context()))
	assert.False(t, write(early))
	assert.False(t, write(c.IsOwner(h)))
	assert.False(t, write(c.IsOwner(nil)))

	h, err = c.Lock("is-owner").Lock(t.Context(), lock.AtLeast(time.Minute))
	require.NoError(t, err)
	assert.True(t, write(c.IsOwner(h)))
	require.NoError(t, h.Unlock(t.Context()))
	assert.False(t, write(c.IsOwner(h)), "it is kept, and nobody holds it")
}

// A hold that needs a longer lease, or one that ends, gets a lease of its own. It goes with the hold.
func TestOwnLease(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	granted := func(id clientv3.LeaseID) time.Duration {
		l, err := etcd.TimeToLive(t.Context(), id)
		require.NoError(t, err)
		return time.Duration(l.GrantedTTL) * time.Second
	}
	gone := func(id clientv3.LeaseID) {
		harness.Eventually(t, bound, "the lease is gone", func() bool {
			l, err := etcd.TimeToLive(t.Context(), id)
			return err == nil && l.TTL < 0
		})
	}

	h, err := c.Lock("own-lease").Lock(t.Context())
	require.NoError(t, err)
	common := leaseOf(t, etcd, "own-lease")
	assert.Equal(t, ttl, granted(common))
	token := h.Token()
	require.NoError(t, h.Extend(t.Context(), time.Second))
	assert.Equal(t, common, leaseOf(t, etcd, "own-lease"), "the common lease is long enough")
	require.NoError(t, h.Extend(t.Context(), time.Minute))
	first := leaseOf(t, etcd, "own-lease")
	assert.Equal(t, time.Minute, granted(first))
	assert.Greater(t, h.Remaining(), 50*time.Second)
	require.NoError(t, h.Extend(t.Context(), time.Hour))
	second := leaseOf(t, etcd, "own-lease")
	assert.Equal(t, time.Hour, granted(second))
	gone(first)
	assert.Equal(t, token, h.Token())
	require.NoError(t, h.Unlock(t.Context()))
	gone(second)

	h, err = c.Lock("own-lease").Lock(t.Context(), lock.Lease(1500*time.Millisecond))
	require.NoError(t, err)
	third := leaseOf(t, etcd, "own-lease")
	assert.Equal(t, 2*time.Second, granted(third))
	assert.LessOrEqual(t, h.Remaining(), 1500*time.Millisecond)
	require.NoError(t, h.Extend(t.Context(), 100*time.Millisecond))
	assert.Greater(t, h.Remaining(), time.Second, "Extend does not shorten")
	lost(t, h, bound, lock.ReasonExpired)
	gone(third)
	nothingLeft(t, etcd, "own-lease")
}

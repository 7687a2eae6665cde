package semaphore_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

const (
	// soon is enough for a few round trips on a busy machine.
	soon = 10 * time.Second
	// slack is how late a busy machine may be. The poll interval is twice as long, the
	// heartbeat interval shorter.
	slack = 2500 * time.Millisecond
)

// anySemaphore is the common interface of both kinds.
type anySemaphore interface {
	Name() string
	TrySetPermits(ctx context.Context, permits int) (bool, error)
	AddPermits(ctx context.Context, delta int) error
	SetPermits(ctx context.Context, permits int) error
	Delete(ctx context.Context) (bool, error)
	Exists(ctx context.Context) (bool, error)
	Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error
	Available(ctx context.Context) (int, error)
	acquire(ctx context.Context, n int, opts ...lock.Option) (acquired, error)
	tryAcquire(ctx context.Context, n int) (acquired, error)
}

// acquired releases acquired permits.
type acquired func(ctx context.Context) error

type plain struct{ *semaphore.Semaphore }

func (p plain) acquire(ctx context.Context, n int, opts ...lock.Option) (acquired, error) {
	return p.acquired(n, p.Acquire(ctx, n, opts...))
}

func (p plain) tryAcquire(ctx context.Context, n int) (acquired, error) {
	return p.acquired(n, p.TryAcquire(ctx, n))
}

func (p plain) acquired(n int, err error) (acquired, error) {
	return func(ctx context.Context) error { return p.Release(ctx, n) }, err
}

type permitSem struct{ *semaphore.PermitSemaphore }

func (e permitSem) acquire(ctx context.Context, n int, opts ...lock.Option) (acquired, error) {
	return e.acquired(e.AcquireN(ctx, n, opts...))
}

func (e permitSem) tryAcquire(ctx context.Context, n int) (acquired, error) {
	return e.acquired(e.TryAcquireN(ctx, n))
}

func (e permitSem) acquired(p *semaphore.Permit, err error) (acquired, error) {
	if err != nil {
		return nil, err
	}
	ids := p.IDs() // so that it is not released when the test drops it
	return func(ctx context.Context) error { return e.Release(ctx, ids...) }, nil
}

type semaphoreOf func(c *redlatch.Client, name string, opts ...semaphore.Option) anySemaphore

type kind struct {
	name string
	of   semaphoreOf
}

func (k kind) String() string { return k.name }

var kinds = []kind{
	{"semaphore", func(c *redlatch.Client, name string, opts ...semaphore.Option) anySemaphore {
		return plain{c.Semaphore(name, opts...)}
	}},
	{"permit semaphore", func(c *redlatch.Client, name string, opts ...semaphore.Option) anySemaphore {
		return permitSem{c.PermitSemaphore(name, opts...)}
	}},
}

// eachKind runs a test for both kinds on every server program, each on its own server.
func eachKind(t *testing.T, test func(t *testing.T, s *testserver.Server, of semaphoreOf)) {
	harness.EachOf(t, kinds, kind.String, func(t *testing.T, s *testserver.Server, k kind) { test(t, s, k.of) })
}

func idsOf(permits []*semaphore.Permit) []string {
	ids := make([]string, len(permits))
	for i, p := range permits {
		ids[i] = p.ID()
	}
	return ids
}

// withPermits creates a semaphore with this number of permits.
func withPermits[S anySemaphore](t testing.TB, s S, permits int) S {
	t.Helper()
	made, err := s.TrySetPermits(context.Background(), permits)
	require.NoError(t, err)
	require.True(t, made)
	return s
}

func mustAcquire(t testing.TB, s anySemaphore, n int, opts ...lock.Option) acquired {
	t.Helper()
	permits, err := s.acquire(context.Background(), n, patient(opts)...)
	require.NoError(t, err)
	return permits
}

// patient adds a bound to options without one, so that a test cannot hang.
func patient(opts []lock.Option) []lock.Option {
	return append([]lock.Option{lock.Wait(2 * soon)}, opts...)
}

func (a acquired) release(t testing.TB) {
	t.Helper()
	require.NoError(t, a(context.Background()))
}

func available(t testing.TB, s interface {
	Available(ctx context.Context) (int, error)
}) int {
	t.Helper()
	n, err := s.Available(context.Background())
	require.NoError(t, err)
	return n
}

func TestTrySetPermits(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		sem := of(harness.Client(t, s), "orders")
		require.Equal(t, "orders", sem.Name())
		require.Zero(t, available(t, sem))
		_, err := sem.tryAcquire(t.Context(), 1)
		require.ErrorIs(t, err, semaphore.ErrNotFound)
		withPermits(t, sem, 10)
		require.Equal(t, 10, available(t, sem))
		for _, c := range []*redlatch.Client{harness.Client(t, s), harness.Client(t, s)} {
			made, err := of(c, "orders").TrySetPermits(t.Context(), 15)
			require.NoError(t, err)
			require.False(t, made)
			require.Equal(t, 10, available(t, of(c, "orders")))
		}
		require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, "orders"))

		// 0 is a valid number of permits.
		none := withPermits(t, of(harness.Client(t, s), "none"), 0)
		made, err := none.TrySetPermits(t.Context(), 1)
		require.NoError(t, err)
		require.False(t, made)
	})
}

func TestSemaphoreKeepsTimeToLive(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const ttl = 700 * time.Millisecond
		sem := harness.Client(t, s).Semaphore("orders")
		begin := time.Now()
		made, err := sem.TrySetPermitsFor(t.Context(), 3, ttl)
		require.NoError(t, err)
		require.True(t, made)
		require.Equal(t, 3, available(t, sem))
		made, err = sem.TrySetPermitsFor(t.Context(), 5, time.Hour)
		require.NoError(t, err)
		require.False(t, made)

		// No operation changes the time to live.
		require.NoError(t, sem.Acquire(t.Context(), 2))
		require.NoError(t, sem.AddPermits(t.Context(), 1))
		require.NoError(t, sem.Release(t.Context(), 1))
		n, err := sem.Drain(t.Context())
		require.NoError(t, err)
		require.Equal(t, 3, n)
		require.NoError(t, sem.Release(t.Context(), 1))
		ttlLeft := harness.PTTL(t, s.Addr, "orders")
		require.Positive(t, ttlLeft)
		require.LessOrEqual(t, ttlLeft, ttl.Milliseconds())

		harness.Eventually(t, ttl+slack, "the semaphore has expired", func() bool { return available(t, sem) == 0 })
		require.GreaterOrEqual(t, time.Since(begin), ttl-5*time.Millisecond)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
		withPermits(t, plain{sem}, 1)
	})
}

func TestPermitCount(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		sem := withPermits(t, plain{harness.Client(t, s).Semaphore("orders")}, 10)
		other := harness.Client(t, s).Semaphore("orders")
		ctx := t.Context()
		require.NoError(t, sem.Acquire(ctx, 9))
		require.Equal(t, 1, available(t, sem))
		require.NoError(t, other.Release(ctx, 9)) // acquired by another client
		require.Equal(t, 10, available(t, sem))
		require.NoError(t, sem.Acquire(ctx, 5))
		require.Equal(t, 5, available(t, sem))
		require.NoError(t, sem.Release(ctx, 5))
		require.Equal(t, 10, available(t, sem))

		require.ErrorIs(t, sem.TryAcquire(ctx, 11), lock.ErrNotAcquired)
		require.ErrorIs(t, sem.Acquire(ctx, 11, lock.Wait(0)), lock.ErrNotAcquired)
		require.NoError(t, sem.TryAcquire(ctx, 10))
		require.ErrorIs(t, other.TryAcquire(ctx, 1), lock.ErrNotAcquired)
		require.Zero(t, available(t, sem))
	})
}

func TestAddPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx := t.Context()
		sem := withPermits(t, plain{harness.Client(t, s).Semaphore("more")}, 10)
		mustAcquire(t, sem, 10)
		require.Zero(t, available(t, sem))
		require.NoError(t, sem.AddPermits(ctx, 4))
		require.Equal(t, 4, available(t, sem))
		require.NoError(t, sem.Release(ctx, 10))
		require.Equal(t, 14, available(t, sem))
		mustAcquire(t, sem, 5)
		require.Equal(t, 9, available(t, sem))

		sem = withPermits(t, plain{harness.Client(t, s).Semaphore("fewer")}, 10)
		mustAcquire(t, sem, 10)
		require.NoError(t, sem.AddPermits(ctx, -5))
		require.Equal(t, -5, available(t, sem))
		require.ErrorIs(t, sem.TryAcquire(ctx, 1), lock.ErrNotAcquired)
		require.NoError(t, sem.Release(ctx, 10))
		require.Equal(t, 5, available(t, sem))
		mustAcquire(t, sem, 5)
		require.Zero(t, available(t, sem))

		sem = plain{harness.Client(t, s).Semaphore("new")}
		require.NoError(t, sem.AddPermits(ctx, 2))
		require.Equal(t, 2, available(t, sem))
	})
}

func TestDrain(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		sem := plain{harness.Client(t, s).Semaphore("orders")}
		drained := func() int {
			n, err := sem.Drain(t.Context())
			require.NoError(t, err)
			return n
		}
		require.Zero(t, drained())
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
		withPermits(t, sem, 10)
		mustAcquire(t, sem, 3)
		require.Equal(t, 7, drained())
		require.Zero(t, available(t, sem))
		require.Zero(t, drained())
		require.NoError(t, sem.AddPermits(t.Context(), -4))
		require.Equal(t, -4, drained())
		require.Zero(t, available(t, sem))
	})
}

func TestReleaseIfExists(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		sem := plain{harness.Client(t, s).Semaphore("orders")}
		there, err := sem.ReleaseIfExists(t.Context(), 1)
		require.NoError(t, err)
		require.False(t, there)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
		withPermits(t, sem, 9)
		there, err = sem.ReleaseIfExists(t.Context(), 1)
		require.NoError(t, err)
		require.True(t, there)
		require.Equal(t, 10, available(t, sem))
	})
}

func TestAcquireWaitsForRelease(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		here := withPermits(t, of(c, "orders"), 1)
		for _, waiting := range []*redlatch.Client{c, other} {
			held := mustAcquire(t, here, 1)
			w := startBehind(t, waiting, of(waiting, "orders"), 1)
			held.release(t)
			got := w.Got()
			_, err := here.tryAcquire(t.Context(), 1)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Zero(t, available(t, here))
			got.release(t)
			require.Equal(t, 1, available(t, here))
		}
	})
}

func TestReleasesAddUp(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		here := withPermits(t, of(c, "orders"), 5)
		for _, waiting := range []*redlatch.Client{c, other} {
			held := []acquired{mustAcquire(t, here, 1), mustAcquire(t, here, 1), mustAcquire(t, here, 1)}
			w := startBehind(t, waiting, of(waiting, "orders"), 4)
			held[0].release(t)
			require.True(t, w.Running())
			require.Equal(t, 3, available(t, here))
			held[1].release(t)
			got := w.Got()
			require.Zero(t, available(t, here))
			got.release(t)
			held[2].release(t)
		}
	})
}

// A request for all permits is served between requests for one.
func TestMaxPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const clients, loops = 4, 10
		sem := withPermits(t, plain{harness.Client(t, s).Semaphore("orders")}, semaphore.MaxPermits)
		var wg sync.WaitGroup
		for range clients {
			sem := plain{harness.Client(t, s).Semaphore("orders")}
			for i := range loops {
				n := []int{semaphore.MaxPermits, 1}[i%2]
				wg.Go(func() {
					permits, err := sem.acquire(context.Background(), n, lock.Wait(time.Minute))
					if assert.NoError(t, err) {
						time.Sleep(5 * time.Millisecond)
						assert.NoError(t, permits(context.Background()))
					}
				})
			}
		}
		wg.Wait()
		require.Equal(t, semaphore.MaxPermits, available(t, sem))
	})
}

func TestConcurrentUseStaysWithinLimit(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits, clients, goroutines = 7, 4, 6
		passes := harness.Size(5, 10)
		all := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		var mu sync.Mutex
		used, most := 0, 0
		use := func(n int) {
			mu.Lock()
			defer mu.Unlock()
			used += n
			most = max(most, used)
		}
		var wg sync.WaitGroup
		for range clients {
			sem := of(harness.Client(t, s), "orders")
			for g := range goroutines {
				wg.Go(func() {
					for i := range passes {
						n := []int{1, 2, 1, permits}[(g+i)%4]
						permits, err := sem.acquire(context.Background(), n)
						if !assert.NoError(t, err) {
							return
						}
						use(n)
						time.Sleep(time.Millisecond)
						use(-n)
						assert.NoError(t, permits(context.Background()))
					}
				})
			}
		}
		wg.Wait()
		require.Equal(t, permits, most)
		require.Equal(t, permits, available(t, all))
		harness.Do(t, s.Addr, "DEL", "orders")
		harness.NothingStays(t, s.Addr)
	})
}

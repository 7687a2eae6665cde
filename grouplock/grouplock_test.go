package grouplock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/grouplock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

func mustLock(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	return h
}

// Locks exclude each other if they have a value in common, whatever the order of their values, and only then. A failed
// attempt has locked none of them.
func TestOnlyLocksWithACommonValueExcludeEachOther(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		for _, from := range []*redlatch.Client{c, other} {
			h := mustLock(t, c.GroupLock("seats", "a", "b"))
			for _, values := range [][]string{{"a"}, {"b"}, {"b", "a"}, {"b", "b"}, {"c", "b"}, {"a", "c"}, {"d", "c", "b", "a"}} {
				l := from.GroupLock("seats", values...)
				_, err := l.TryLock(t.Context())
				harness.NotAcquired(t, err)
				require.True(t, harness.IsLocked(t, l))
			}
			for _, l := range []*grouplock.Lock{from.GroupLock("seats", "c", "d"), from.GroupLock("seats", ""), from.GroupLock("other", "a", "b")} {
				require.False(t, harness.IsLocked(t, l))
				require.NoError(t, l.Do(t.Context(), func(context.Context) error { return nil }, lock.Wait(0)))
			}
			require.NoError(t, h.Unlock(t.Context()))
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// A release wakes waiters for any of its values, in the same process and in another one, and none that waits for what
// is still locked.
func TestReleaseWakesWaitersForItsValues(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		first := mustLock(t, c.GroupLock("seats", "a", "b"), lock.Lease(time.Hour))
		second := mustLock(t, c.GroupLock("seats", "c"), lock.Lease(time.Hour))
		for _, from := range []*redlatch.Client{c, other} {
			both := harness.StartLock(t, t.Context(), from.GroupLock("seats", "b", "c"))
			one := harness.StartLock(t, t.Context(), from.GroupLock("seats", "a"))
			harness.Waits(t, 2, from)

			require.NoError(t, first.Unlock(t.Context()))
			h := one.Got()
			require.True(t, both.Running(), "one of its values is locked")
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, second.Unlock(t.Context()))
			require.NoError(t, both.Got().Unlock(t.Context()))
			first, second = mustLock(t, c.GroupLock("seats", "a", "b")), mustLock(t, c.GroupLock("seats", "c"))
		}
		require.NoError(t, first.Unlock(t.Context()))
		require.NoError(t, second.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// Many callers of two processes that want random values, in random order, all get them again and again. Nobody ever has
// a value that somebody else has.
func TestOverlappingValuesWithoutADeadlock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const callers, rounds, seats = 6, 15, 5
		var taken [seats]sync.Mutex
		var wg sync.WaitGroup
		for _, c := range []*redlatch.Client{harness.Client(t, s), harness.Client(t, s)} {
			for range callers {
				wg.Go(func() {
					for range rounds {
						numbers := rand.Perm(seats)[:1+rand.IntN(seats)]
						values := make([]string, len(numbers))
						for i, n := range numbers {
							values[i] = fmt.Sprint("seat ", n)
						}
						err := c.GroupLock("seats", values...).Do(t.Context(), func(context.Context) error {
							for _, n := range numbers {
								if !taken[n].TryLock() {
									return fmt.Errorf("seat %d is taken", n)
								}
								defer taken[n].Unlock()
							}
							return nil
						}, lock.Wait(time.Minute))
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
		}
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}

// A hold is renewed while other holds of the group come and go, and also if it has many values.
func TestHoldsOfAGroupAreRenewed(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t), s.Client(t)
		holds := []lock.Hold{mustLock(t, c.GroupLock("seats", "a", "b")), mustLock(t, c.GroupLock("seats", "c")), mustLock(t, c.GroupLock("seats", manyValues(1000)...))}
		fixed := mustLock(t, c.GroupLock("seats", "d"), lock.Lease(time.Minute))
		for range 20 {
			time.Sleep(10 * time.Second)
			for _, value := range []string{"a", "c", "999"} {
				_, err := other.GroupLock("seats", value).TryLock(t.Context())
				harness.NotAcquired(t, err)
			}
		}
		require.ErrorIs(t, fixed.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, other.GroupLock("seats", "d").Do(t.Context(), func(context.Context) error { return nil }))
		for _, h := range holds {
			require.NoError(t, h.Unlock(t.Context()))
		}
		synctest.Wait()
		s.NothingLeft(t)
	})
}

// A hold that loses one of its values is lost at its next renewal, with all of them. Unlock releases the others.
func TestAHoldStandsWithAllOfItsValues(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t), s.Client(t)
		h := mustLock(t, c.GroupLock("seats", "a", "b"))
		forced, err := other.GroupLock("seats", "b", "c").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		next := mustLock(t, other.GroupLock("seats", "b"))
		require.NoError(t, h.Context().Err())

		<-h.Context().Done()
		require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
		require.True(t, harness.IsLocked(t, other.GroupLock("seats", "a")))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		synctest.Wait()
		require.False(t, harness.IsLocked(t, other.GroupLock("seats", "a")))
		require.NoError(t, next.Unlock(t.Context()))
	})
}

// Where the server has the values of a dead process, they are free when its lease is over, and the next one removes
// what is left, although other values keep the key.
func TestNothingIsLeftOfADeadOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		h := mustLock(t, c.GroupLock("seats", "c"))
		dead, a := "018f4c3a-1111-7000-8000-000000000001:1", grouplock.FieldOf("a")
		harness.Do(t, s.Addr, "HSET", "seats", a, dead, a+":"+dead+":expire_time", "1700000000000", a+":"+dead+":lock_count", "1")
		l := c.GroupLock("seats", "b", "a")
		require.False(t, harness.IsLocked(t, l))
		next := mustLock(t, l)
		fields, err := testserver.Query(s.Addr, "HKEYS", "seats")
		require.NoError(t, err)
		require.Len(t, fields, 9)
		require.NotContains(t, strings.Join(fields, " "), dead)
		require.NoError(t, next.Unlock(t.Context()))
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestInvalidValues(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for _, values := range [][]string{nil, manyValues(1001)} {
			_, err := c.GroupLock("seats", values...).TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		_, err := c.MultiLock(c.GroupLock("seats", "a"), c.GroupLock("seats", "b")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid, "their order is not known")
		repeated := append(manyValues(1000), manyValues(1000)...)
		require.NoError(t, mustLock(t, c.GroupLock("seats", repeated...)).Unlock(t.Context()))
		require.NoError(t, mustLock(t, c.MultiLock(c.GroupLock("seats", "a"), c.Lock("orders"))).Unlock(t.Context()))
	})
}

func manyValues(n int) []string {
	values := make([]string, n)
	for i := range values {
		values[i] = fmt.Sprint(i)
	}
	return values
}

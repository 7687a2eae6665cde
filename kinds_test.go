package redlatch_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/semaphore"
)

// exclusive are locks that one owner holds at once and that leave nothing behind.
var exclusive = map[string]func(c *redlatch.Client, name string) lock.Locker{
	"lock":  func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) },
	"fair":  func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) },
	"write": func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() },
	"plain": func(c *redlatch.Client, name string) lock.Locker { return c.PlainLock(name) },
}

func TestEveryKindInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range []pubsub.Mode{pubsub.Sharded, pubsub.Plain} {
			t.Run(mode.String(), func(t *testing.T) {
				here := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				there := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				for kind, of := range exclusive {
					for i := range 6 { // enough names for every primary to have some
						name := fmt.Sprint(kind, "-", i)
						wokenByMessage(t, here, there, of(here, name), of(there, name))
					}
				}
				for i := range 6 {
					name := fmt.Sprint("rw-", i)
					wokenByMessage(t, here, there, here.RWLock(name).Write(), there.RWLock(name).Read())
					wokenByMessage(t, here, there, here.RWLock(name).Read(), there.RWLock(name).Write())
				}
				for i := range 6 {
					latchReleases(t, here, there, fmt.Sprint("latch-", i))
				}
			})
		}
		t.Run("renewed", func(t *testing.T) { everyKindIsRenewed(t, cluster.Addrs()) })
		for _, node := range cluster.Primaries {
			harness.NothingLeft(t, node.Addr)
		}
		for _, mode := range []pubsub.Mode{pubsub.Sharded, pubsub.Plain} {
			t.Run("semaphores/"+mode.String(), func(t *testing.T) {
				semaphoresAreShared(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
			})
		}
	})
}

// semaphoresAreShared has waiters of one client served by messages of another, and
// permits renewed, on as many names as it takes for every primary to have some.
func semaphoresAreShared(t *testing.T, addrs []string, mode redlatch.Option) {
	t.Helper()
	const timeout = 2 * time.Second
	here := harness.ClientAt(t, addrs, mode, redlatch.WithWatchdogTimeout(timeout))
	there := harness.ClientAt(t, addrs, mode)
	ctx := t.Context()
	var kept []*semaphore.Permit
	for i := range 6 {
		name := fmt.Sprint("permits-", i)
		e := here.PermitSemaphore(name)
		require.NoError(t, e.SetPermits(ctx, 2))
		p, err := e.Acquire(ctx)
		require.NoError(t, err)
		kept = append(kept, p)
		served := make(chan error, 1)
		p, err = e.Acquire(ctx, lock.Lease(time.Hour))
		require.NoError(t, err)
		go func() {
			p, err := there.PermitSemaphore(name).Acquire(context.Background())
			if err == nil {
				err = p.Release(context.Background())
			}
			served <- err
		}()
		servedByMessage(t, there, served, func() error { return p.Release(ctx) })

		s := here.Semaphore("plain-" + name)
		require.NoError(t, s.Release(ctx, 1))
		require.NoError(t, s.Acquire(ctx, 1))
		go func() { served <- there.Semaphore("plain-"+name).Acquire(context.Background(), 1) }()
		servedByMessage(t, there, served, func() error { return s.Release(ctx, 1) })
	}
	time.Sleep(timeout + timeout/2)
	for _, p := range kept {
		require.NoError(t, p.Context().Err(), "renewed")
		require.NoError(t, p.Release(ctx))
	}
}

// servedByMessage releases when the waiter there listens.
func servedByMessage(t *testing.T, there *redlatch.Client, served <-chan error, release func() error) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the waiter listens", func() bool {
		now := there.PubSub()
		return now.Listeners > 0 && now.Subscribed == now.Channels
	})
	before := there.PubSub().Messages
	require.NoError(t, release())
	require.NoError(t, <-served)
	require.Greater(t, there.PubSub().Messages, before)
}

// wokenByMessage has a waiter there get what is released here. The lease is no
// help.
func wokenByMessage(t *testing.T, here, there *redlatch.Client, ours, theirs lock.Locker) {
	t.Helper()
	for _, named := range []bool{false, true} {
		ctx := t.Context()
		if named {
			ctx = lock.WithOwner(ctx, here.NewOwner())
		}
		h, err := ours.Lock(ctx, lock.Lease(time.Hour))
		require.NoError(t, err)
		_, err = theirs.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		before := there.PubSub()
		waited := make(chan error, 1)
		waiterCtx := context.Background()
		if named {
			waiterCtx = lock.WithOwner(waiterCtx, there.NewOwner())
		}
		go func() { waited <- theirs.Do(waiterCtx, nothing) }()
		harness.Eventually(t, 10*time.Second, "the waiter listens", func() bool {
			now := there.PubSub()
			return now.Listeners > before.Listeners && now.Subscribed == now.Channels
		})
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-waited)
		require.Less(t, time.Since(begin), 3*time.Second, "woken by the safety poll")
	}
}

// latchReleases has a waiter there go on when the count here has come to its end, also
// if the next round begins at once.
func latchReleases(t *testing.T, here, there *redlatch.Client, name string) {
	t.Helper()
	l, theirs := here.CountDownLatch(name), there.CountDownLatch(name)
	set := func() {
		ok, err := l.TrySetCount(t.Context(), 1)
		require.NoError(t, err)
		require.True(t, ok)
	}
	set()
	for range 10 {
		before := there.PubSub()
		waited := make(chan error, 1)
		go func() { waited <- theirs.Wait(context.Background()) }()
		harness.Eventually(t, 10*time.Second, "the waiter listens", func() bool {
			now := there.PubSub()
			return now.Listeners > before.Listeners && now.Subscribed == now.Channels
		})
		begin := time.Now()
		left, err := l.CountDown(t.Context())
		require.NoError(t, err)
		require.Zero(t, left)
		set()
		require.NoError(t, <-waited)
		require.Less(t, time.Since(begin), 3*time.Second, "released by the safety poll")
	}
	deleted, err := l.Delete(t.Context())
	require.NoError(t, err)
	require.True(t, deleted)
}

func TestEveryKindIsRenewed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		everyKindIsRenewed(t, []string{s.Addr})
		harness.NothingLeft(t, s.Addr)
	})
}

func everyKindIsRenewed(t *testing.T, addrs []string) {
	t.Helper()
	const timeout = time.Second
	c := harness.ClientAt(t, addrs, redlatch.WithWatchdogTimeout(timeout))
	var holds []lock.Hold
	take := func(ctx context.Context, l lock.Locker) {
		h, err := l.Lock(ctx)
		require.NoError(t, err)
		holds = append(holds, h)
	}
	for i := range 10 {
		owner := lock.WithOwner(t.Context(), c.NewOwner())
		for kind, of := range exclusive {
			take(t.Context(), of(c, fmt.Sprint(kind, i)))
			take(owner, of(c, fmt.Sprint(kind, "-named", i)))
			if kind != "plain" { // which an owner holds once
				take(owner, of(c, fmt.Sprint(kind, "-named", i)))
			}
		}
		rw := c.RWLock(fmt.Sprint("read", i))
		take(t.Context(), rw.Read())
		take(t.Context(), rw.Read())
		take(owner, rw.Read())
		take(owner, rw.Read())
		down := c.RWLock(fmt.Sprint("down", i))
		take(owner, down.Write())
		take(owner, down.Read())
	}
	<-time.After(2 * timeout)
	for _, h := range holds {
		require.NoError(t, h.Context().Err(), h.Name())
		require.NoError(t, h.Unlock(t.Context()), h.Name())
	}
}

// TestWhoDropsAHoldIsNamed has holds of every kind collected: the log says where each
// was acquired, however it was.
func TestWhoDropsAHoldIsNamed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		c, ctx := harness.Client(t, s, redlatch.WithLogger(log.Logger())), t.Context()
		permits := c.PermitSemaphore("permits")
		require.NoError(t, permits.SetPermits(ctx, 4))
		errOf := func(_ any, err error) error { return err }
		drops := map[string]func() error{
			"permit":      func() error { return errOf(permits.Acquire(ctx)) },
			"permits":     func() error { return errOf(permits.AcquireN(ctx, 1)) },
			"try permit":  func() error { return errOf(permits.TryAcquire(ctx)) },
			"try permits": func() error { return errOf(permits.TryAcquireN(ctx, 1)) },
			"no Locker":   func() error { return errOf(c.Lock("no Locker").Lock(ctx)) },
		}
		for kind, of := range map[string]func(name string) lock.Locker{
			"lock":   func(name string) lock.Locker { return c.Lock(name) },
			"fenced": func(name string) lock.Locker { return c.FencedLock(name) },
			"spin":   func(name string) lock.Locker { return c.SpinLock(name) },
			"plain":  func(name string) lock.Locker { return c.PlainLock(name) },
			"fair":   func(name string) lock.Locker { return c.FairLock(name) },
			"read":   func(name string) lock.Locker { return c.RWLock(name).Read() },
			"write":  func(name string) lock.Locker { return c.RWLock(name).Write() },
			"multi":  func(name string) lock.Locker { return c.MultiLock(c.Lock(name), c.FairLock("fair "+name)) },
			"red":    func(name string) lock.Locker { return c.RedLock(c.Lock(name)) },
		} {
			l, try := of("a "+kind), of("another "+kind)
			drops[kind] = func() error { return errOf(l.Lock(ctx)) }
			drops["try "+kind] = func() error { return errOf(try.TryLock(ctx)) }
		}
		for kind, drop := range drops {
			t.Run(kind, func(t *testing.T) {
				before := len(log.String())
				require.NoError(t, drop())
				dropped := ""
				harness.Eventually(t, 10*time.Second, "it is logged", func() bool {
					runtime.GC()
					dropped = log.String()[before:]
					return strings.Contains(dropped, "dropped without")
				})
				require.Regexp(t, `acquired="github.com/redlatch/redlatch_test\.\S*TestWhoDropsAHoldIsNamed\S* \(\S*kinds_test.go:\d+\)"`, dropped)
			})
		}
	})
}

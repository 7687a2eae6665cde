package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// crowd is goroutines that take a lock and hold it until they are told to leave.
type crowd struct {
	t       *testing.T
	entered chan error
	leave   chan struct{}
	wg      sync.WaitGroup
	size    int
}

func newCrowd(t *testing.T) *crowd {
	return &crowd{t: t, entered: make(chan error, 1000), leave: make(chan struct{})}
}

func (c *crowd) add(n int, l lock.Locker) {
	c.size += n
	for range n {
		c.wg.Go(func() {
			h, err := l.Lock(context.Background())
			c.entered <- err
			if err == nil {
				<-c.leave
				assert.NoError(c.t, h.Unlock(context.Background()))
			}
		})
	}
}

// allIn fails the test unless all of them hold the lock within d, together.
func (c *crowd) allIn(d time.Duration) {
	c.t.Helper()
	deadline := time.After(d)
	for n := range c.size {
		select {
		case err := <-c.entered:
			require.NoError(c.t, err)
		case <-deadline:
			require.FailNow(c.t, fmt.Sprintf("%d of %d entered within %v", n, c.size, d))
		}
	}
}

func (c *crowd) out() {
	close(c.leave)
	c.wg.Wait()
}

func TestReadersOfAProcessEnterWithOneRequest(t *testing.T) {
	const readers = 20
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		for _, released := range []struct {
			where    string
			requests int // of the release, and of the readers
		}{{"here", 1}, {"elsewhere", 2}} {
			t.Run("released "+released.where, func(t *testing.T) {
				c := harness.Client(t, s)
				holder := c
				if released.where == "elsewhere" {
					holder = harness.Client(t, s)
				}
				harness.WarmUp(t, s.Addr)
				w := mustLock(t, writing(holder, "orders"))
				harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
				waiting := newCrowd(t)
				waiting.add(readers, reading(c, "orders"))
				quiet(t, s, readers, 2)
				harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
				unlock(t, w)
				waiting.allIn(time.Second)
				require.Equal(t, released.requests, harness.Commands(t, conn)["evalsha"])
				waiting.out()
				require.Equal(t, released.requests+readers, harness.Commands(t, conn)["evalsha"])
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

func TestAllReadersEnterWhenAWriterLeaves(t *testing.T) {
	const clients, readersEach = 4, 5
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, where := range []string{"of one of their clients", "of another client"} {
			t.Run("a writer "+where, func(t *testing.T) {
				harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
				waiting := newCrowd(t)
				var holder *redlatch.Client
				var w lock.Hold
				if where == "of another client" {
					holder = harness.Client(t, s)
					w = mustLock(t, writing(holder, "orders"), lock.Lease(time.Minute))
				}
				for n := range clients {
					c := harness.Client(t, s)
					if w == nil {
						w = mustLock(t, writing(c, "orders"), lock.Lease(time.Minute))
					}
					waiting.add(readersEach-1, reading(c, "orders"))
					quiet(t, s, waiting.size, 3*n+2)
					waiting.add(1, withOwner{reading(c, "orders"), c.NewOwner()}) // who is not tried for with the others
					quiet(t, s, waiting.size, 3*n+3)
				}
				unlock(t, w)
				waiting.allIn(time.Second)
				waiting.out()
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

// withOwner is a lock taken as an owner.
type withOwner struct {
	lock.Locker
	o lock.Owner
}

func (l withOwner) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.Locker.Lock(lock.WithOwner(ctx, l.o), opts...)
}

func TestFirstComeFirstServedInAProcess(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, held := range []string{"here", "elsewhere"} {
			t.Run("held "+held, func(t *testing.T) {
				c := harness.Client(t, s)
				holder := c
				if held == "elsewhere" {
					holder = harness.Client(t, s)
				}
				r := mustLock(t, reading(holder, "orders"))
				harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
				w1, leaveW1 := inBackground(t.Context(), writing(c, "orders"))
				quiet(t, s, 1, 2)
				readers := newCrowd(t)
				readers.add(3, reading(c, "orders"))
				quiet(t, s, 4, 2)
				w2, leaveW2 := inBackground(t.Context(), writing(c, "orders"))
				quiet(t, s, 5, 2)
				late, leaveLate := inBackground(t.Context(), reading(c, "orders"))
				quiet(t, s, 6, 2)
				require.False(t, tries(t, t.Context(), reading(c, "orders")), "behind a writer")

				unlock(t, r)
				enters(t, w1, time.Second)
				require.Empty(t, readers.entered)
				close(leaveW1)
				readers.allIn(time.Second)
				require.Empty(t, w2)
				require.Empty(t, late)
				readers.out()
				enters(t, w2, time.Second)
				require.Empty(t, late)
				close(leaveW2)
				enters(t, late, time.Second)
				close(leaveLate)
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

// The second time the process listens to the channel already.
func TestAWriterKeepsReadersElsewhereOutAtOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		for range 2 {
			r := mustLock(t, reading(c, "orders"))
			entered, leave := inBackground(t.Context(), writing(c, "orders"))
			harness.Eventually(t, time.Second, "a writer waits", func() bool { return exists(t, s, writerWaits) })
			require.False(t, tries(t, t.Context(), reading(other, "orders")))
			unlock(t, r)
			enters(t, entered, time.Second)
			close(leave)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// A hand-off that turns out to be a release, because others read on, leaves the
// waiter it was for listening.
func TestTheWaiterOfAFailedHandOffListens(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		here, there := mustLock(t, reading(c, "orders")), mustLock(t, reading(other, "orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		entered, leave := inBackground(t.Context(), writing(c, "orders"))
		quiet(t, s, 1, 2)
		unlock(t, here)
		harness.Eventually(t, time.Second, "it listens", func() bool { return c.PubSub().Listeners == 1 })
		quiet(t, s, 1, 3)
		require.Empty(t, entered)
		unlock(t, there)
		enters(t, entered, time.Second)
		close(leave)
		harness.NothingLeft(t, s.Addr)
	})
}

// While such a hand-off is under way, the message that all others are gone reaches
// the waiter behind, whom it does not help.
func TestAMessageDuringAFailedHandOffIsHeard(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		here, there := mustLock(t, reading(c, "orders")), mustLock(t, reading(harness.Client(t, s), "orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		writer, leaveWriter := inBackground(t.Context(), writing(c, "orders"))
		quiet(t, s, 1, 2)
		reader, leaveReader := inBackground(t.Context(), reading(c, "orders"))
		quiet(t, s, 2, 2)
		reached := g.Arm(harness.KeepReply, harness.SHA(t, "hand_off.lua"), 1)
		released := make(chan error, 1)
		go func() { released <- here.Unlock(context.Background()) }()
		<-reached
		heard := c.PubSub().Messages
		unlock(t, there)
		harness.Eventually(t, time.Second, "the reader tries", func() bool {
			return c.PubSub().Messages > heard && harness.GoroutinesIn("(*Waiter).attempt") == 1
		})
		require.NoError(t, g.Open())
		enters(t, released, time.Second)
		enters(t, writer, time.Second)
		require.Empty(t, reader)
		close(leaveWriter)
		enters(t, reader, time.Second)
		close(leaveReader)
		harness.NothingLeft(t, s.Addr)
	})
}

// A writer with a named owner makes its first attempt before its turn. It must not
// keep out those it has to wait for.
func TestAWriterKeepsOutNobodyWhoIsBeforeIt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		r := mustLock(t, reading(other, "orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first, _ := inBackground(ctx, writing(other, "orders"))
		quiet(t, s, 1, 2)
		reader, leaveReader := inBackground(t.Context(), reading(c, "orders"))
		quiet(t, s, 2, 4)
		writer, leaveWriter := inBackground(named(t, c), writing(c, "orders"))
		quiet(t, s, 3, 5)
		cancel()
		require.ErrorIs(t, <-first, lock.ErrNotAcquired)
		enters(t, reader, time.Second)
		require.Empty(t, writer)
		unlock(t, r)
		close(leaveReader)
		enters(t, writer, time.Second)
		close(leaveWriter)
		harness.NothingLeft(t, s.Addr)
	})
}

// Readers come and go all the time and the lock is never free. A writer waits for
// those who hold it when it comes, and for a few round trips.
func TestAStreamOfReadersStarvesNoWriter(t *testing.T) {
	const (
		clients, readersEach = 3, 8
		hold                 = 20 * time.Millisecond
		bound                = 2 * time.Second
		rounds               = 20
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		var reads atomic.Int64
		var wg sync.WaitGroup
		var all []*redlatch.Client
		for range clients {
			c := harness.Client(t, s)
			all = append(all, c)
			for range readersEach {
				wg.Go(func() {
					for ctx.Err() == nil {
						err := reading(c, "orders").Do(ctx, func(context.Context) error {
							reads.Add(1)
							<-time.After(hold)
							return nil
						})
						if ctx.Err() == nil {
							assert.NoError(t, err)
						}
					}
				})
			}
		}
		harness.Eventually(t, 10*time.Second, "they read", func() bool { return reads.Load() > clients*readersEach })
		const looks = 100
		locked := 0
		for range looks {
			if harness.IsLocked(t, reading(all[0], "orders")) {
				locked++
			}
			<-time.After(time.Millisecond)
		}
		require.Greater(t, locked, looks*9/10, "there is no stream of readers")

		writers := []harness.Lock{writing(all[0], "orders"), writing(harness.Client(t, s), "orders")}
		var longest [2]time.Duration
		for range rounds {
			before := reads.Load()
			var writing sync.WaitGroup
			for i, l := range writers {
				writing.Go(func() {
					began := time.Now()
					h, err := l.Lock(ctx, lock.Wait(10*time.Second))
					took := time.Since(began)
					if assert.NoError(t, err) {
						longest[i] = max(longest[i], took)
						assert.NoError(t, h.Unlock(ctx))
					}
				})
			}
			writing.Wait()
			if t.Failed() {
				break
			}
			harness.Eventually(t, bound, "they read again", func() bool { return reads.Load() > before+clients*readersEach })
		}
		stop()
		wg.Wait()
		t.Logf("a writer of a reading process waited for %v at most, one of another for %v", longest[0], longest[1])
		require.Less(t, max(longest[0], longest[1]), bound)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestReadersEnterWhenAWriterGivesUp(t *testing.T) {
	gone := errors.New("gone")
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, why := range []string{"context", "wait"} {
			for _, where := range []string{"here", "elsewhere"} {
				for _, name := range []string{"unnamed", "named"} {
					t.Run(fmt.Sprintf("%s, %s, %s", why, where, name), func(t *testing.T) {
						holder, c := harness.Client(t, s), harness.Client(t, s)
						readers := c
						if where == "elsewhere" {
							readers = harness.Client(t, s)
						}
						r := mustLock(t, reading(holder, "orders"), lock.Lease(time.Minute))
						ctx, cancel := context.WithCancelCause(t.Context())
						defer cancel(nil)
						if name == "named" {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						var opts []lock.Option
						if why == "wait" {
							opts = append(opts, lock.Wait(300*time.Millisecond))
						}
						w, _ := inBackground(ctx, writing(c, "orders"), opts...)
						harness.Eventually(t, 5*time.Second, "the writer waits", func() bool { return exists(t, s, writerWaits) })
						waiting := newCrowd(t)
						waiting.add(3, reading(readers, "orders"))
						if why == "context" {
							harness.Eventually(t, 5*time.Second, "the readers wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == 4 })
							require.True(t, exists(t, s, writerWaits))
							require.Empty(t, waiting.entered)
							cancel(gone)
						}
						err := <-w
						require.ErrorIs(t, err, lock.ErrNotAcquired)
						require.Equal(t, why == "context", errors.Is(err, gone))
						waiting.allIn(time.Second)
						require.False(t, exists(t, s, writerWaits))
						unlock(t, r)
						waiting.out()
						harness.NothingLeft(t, s.Addr)
					})
				}
			}
		}
	})
}

// Of two writers that wait, one gives up: the other one still has its turn.
func TestAWriterThatGivesUpLeavesTheOthers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		holder, c, readers := harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)
		r := mustLock(t, reading(holder, "orders"))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		leaves, _ := inBackground(ctx, writing(c, "orders"))
		quiet(t, s, 1, 2)
		stays, leave := inBackground(t.Context(), writing(harness.Client(t, s), "orders"))
		quiet(t, s, 2, 4)
		late, leaveLate := inBackground(t.Context(), reading(readers, "orders"))
		quiet(t, s, 3, 6)
		cancel()
		require.ErrorIs(t, <-leaves, lock.ErrNotAcquired)
		harness.Eventually(t, 5*time.Second, "it has left", func() bool { return harness.Do(t, s.Addr, "SCARD", writerWaits) == ":1" })
		require.Empty(t, late)
		require.False(t, tries(t, t.Context(), reading(holder, "orders")))
		unlock(t, r)
		enters(t, stays, time.Second)
		require.Empty(t, late)
		close(leave)
		enters(t, late, time.Second)
		close(leaveLate)
		harness.NothingLeft(t, s.Addr)
	})
}

// A writer keeps readers out for as long as it waits, and for five seconds at most
// once it has died.
func TestAWriterKilledWhileItWaits(t *testing.T) {
	const (
		life  = 5 * time.Second // of what keeps readers out
		pause = 2 * time.Second // at most, after which the writer renews it
		slack = time.Second
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		holder, c := harness.Client(t, s), harness.Client(t, s)
		r := mustLock(t, reading(holder, "orders"))
		p := harness.Spawn(t, "wait to write", s.Addr)
		require.Equal(t, "waiting", p.Line(30*time.Second))
		waiting := newCrowd(t)
		waiting.add(3, reading(c, "orders"))
		holdsFor(t, s, life-pause+slack, life-pause-slack, writerWaits)
		require.Empty(t, waiting.entered)
		p.Kill()
		killed := time.Now()
		waiting.allIn(life + slack)
		t.Logf("readers entered %v after the writer was killed", time.Since(killed))
		require.False(t, exists(t, s, writerWaits))
		unlock(t, r)
		waiting.out()
		harness.NothingLeft(t, s.Addr)
	})
}

package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
	"github.com/redlatch/redlatch/rwlock"
)

// crowd is a number of goroutines that acquire a lock and hold it until out is called.
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
	eachPlace(t, func(t *testing.T, s *testserver.Server, holder, c *redlatch.Client) {
		harness.WarmUp(t, s.Addr)
		conn := harness.Conn(t, s.Addr)
		const requests = 2 // the release and the attempt
		w := mustLock(t, writing(holder, "orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		waiting := newCrowd(t)
		waiting.add(readers, reading(c, "orders"))
		quiet(t, s, readers, 2, c)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		unlock(t, w)
		waiting.allIn(beforePolls)
		require.Equal(t, requests, harness.Commands(t, conn)["evalsha"])
		waiting.out()
		require.Equal(t, requests+readers, harness.Commands(t, conn)["evalsha"])
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAllReadersEnterWhenAWriterLeaves(t *testing.T) {
	const readersEach = 5
	eachPlace(t, func(t *testing.T, s *testserver.Server, holder, first *redlatch.Client) {
		harness.WarmUp(t, s.Addr)
		all := []*redlatch.Client{first, harness.Client(t, s), harness.Client(t, s)}
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		w := mustLock(t, writing(holder, "orders"), lock.Lease(time.Minute))
		waiting := newCrowd(t)
		requests := 1
		for _, c := range all {
			waiting.add(readersEach-1, reading(c, "orders"))
			requests += 2 // the first attempt, and the one after subscribing
			quiet(t, s, readersEach-1, requests, c)
			waiting.add(1, withOwner{reading(c, "orders"), c.NewOwner()})
			quiet(t, s, readersEach, requests, c)
		}
		unlock(t, w)
		waiting.allIn(beforePolls)
		waiting.out()
		harness.NothingLeft(t, s.Addr)
	})
}

// withOwner is a lock acquired by an owner.
type withOwner struct {
	lock.Locker
	o lock.Owner
}

func (l withOwner) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.Locker.Lock(lock.WithOwner(ctx, l.o), opts...)
}

func TestFirstComeFirstServedInAProcess(t *testing.T) {
	eachPlace(t, func(t *testing.T, s *testserver.Server, holder, c *redlatch.Client) {
		r := mustLock(t, reading(holder, "orders"))
		w1, leaveW1 := inBackground(t.Context(), writing(c, "orders"))
		harness.Waits(t, 1, c)
		readers := newCrowd(t)
		readers.add(3, reading(c, "orders"))
		harness.Waits(t, 4, c)
		w2, leaveW2 := inBackground(t.Context(), writing(c, "orders"))
		harness.Waits(t, 5, c)
		late, leaveLate := inBackground(t.Context(), reading(c, "orders"))
		harness.Waits(t, 6, c)
		require.False(t, tries(t, t.Context(), reading(c, "orders")), "behind a writer")

		unlock(t, r)
		enters(t, w1, beforePolls)
		require.Empty(t, readers.entered)
		close(leaveW1)
		readers.allIn(beforePolls)
		require.Empty(t, w2)
		require.Empty(t, late)
		readers.out()
		enters(t, w2, beforePolls)
		require.Empty(t, late)
		close(leaveW2)
		enters(t, late, beforePolls)
		close(leaveLate)
		harness.NothingLeft(t, s.Addr)
	})
}

// A writer must not block the readers before it in the queue.
func TestAWriterDoesNotBlockReadersBeforeIt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		r := mustLock(t, reading(other, "orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first, _ := inBackground(ctx, writing(other, "orders"))
		quiet(t, s, 1, 2, other)
		reader, leaveReader := inBackground(t.Context(), reading(c, "orders"))
		quiet(t, s, 2, 4, other, c)
		writer, leaveWriter := inBackground(named(t, c), writing(c, "orders"))
		quiet(t, s, 3, 4, other, c)
		cancel()
		harness.NotAcquired(t, <-first)
		enters(t, reader, beforePolls)
		require.Empty(t, writer)
		unlock(t, r)
		close(leaveReader)
		enters(t, writer, beforePolls)
		close(leaveWriter)
		harness.NothingLeft(t, s.Addr)
	})
}

// Readers come and go all the time, and the lock is never free. A writer waits for the readers
// that hold the lock when it arrives, and for a few round trips.
func TestAStreamOfReadersDoesNotStarveAWriter(t *testing.T) {
	const (
		clients, readersEach = 3, 8
		hold                 = 50 * time.Millisecond
		looks                = 100
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx, stop := context.WithCancel(context.Background())
		var reads atomic.Int64
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop()
		var all []*redlatch.Client
		for range clients {
			c := harness.Client(t, s)
			all = append(all, c)
			for range readersEach {
				wg.Go(func() {
					for ctx.Err() == nil {
						err := reading(c, "orders").Do(ctx, func(context.Context) error {
							reads.Add(1)
							time.Sleep(hold)
							return nil
						})
						if ctx.Err() == nil {
							assert.NoError(t, err)
						}
					}
				})
			}
		}
		readAgain := func() {
			t.Helper()
			before := reads.Load()
			harness.Eventually(t, soon, "they read", func() bool { return reads.Load() > before+clients*readersEach })
		}
		readAgain()
		harness.Eventually(t, soon, "there is a stream of readers", func() bool {
			locked := 0
			for range looks {
				if harness.IsLocked(t, reading(all[0], "orders")) {
					locked++
				}
				time.Sleep(time.Millisecond)
			}
			return locked > looks*9/10
		})

		writers := []harness.Lock{writing(all[0], "orders"), writing(harness.Client(t, s), "orders")}
		for range harness.Size(5, 20) {
			var writing sync.WaitGroup
			for _, l := range writers {
				writing.Go(func() { assert.NoError(t, l.Do(ctx, nothing, lock.Wait(soon))) })
			}
			writing.Wait()
			require.False(t, t.Failed())
			readAgain()
		}
		stop()
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}

func TestReadersEnterWhenAWriterGivesUp(t *testing.T) {
	gone := errors.New("gone")
	eachPlace(t, func(t *testing.T, s *testserver.Server, c, readers *redlatch.Client) {
		holder := harness.Client(t, s)
		for _, ctx := range []context.Context{t.Context(), named(t, c)} {
			for _, why := range []string{"context", "wait"} {
				r := mustLock(t, reading(holder, "orders"), lock.Lease(time.Minute))
				ctx, cancel := context.WithCancelCause(ctx)
				var opts []lock.Option
				if why == "wait" {
					opts = append(opts, lock.Wait(1500*time.Millisecond))
				}
				w, _ := inBackground(ctx, writing(c, "orders"), opts...)
				harness.Eventually(t, soon, "the writer waits", func() bool { return exists(t, s, writerWaits) })
				waiting := newCrowd(t)
				waiting.add(3, reading(readers, "orders"))
				if why == "context" {
					harness.Waits(t, 4, slices.Compact([]*redlatch.Client{c, readers})...)
					require.True(t, exists(t, s, writerWaits))
					require.Empty(t, waiting.entered)
					cancel(gone)
				}
				err := harness.Receive(t, soon, "the end of the wait", w)
				harness.NotAcquired(t, err)
				require.Equal(t, why == "context", errors.Is(err, gone))
				waiting.allIn(beforePolls)
				require.False(t, exists(t, s, writerWaits))
				unlock(t, r)
				waiting.out()
				cancel(nil)
				harness.NothingLeft(t, s.Addr)
			}
		}
	})
}

// A writer blocks readers for as long as it waits, and for at most five seconds after it dies.
func TestAWriterKilledWhileItWaits(t *testing.T) {
	const slack = 2500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		holder, c := harness.Client(t, s), harness.Client(t, s)
		dead, g := harness.GatedClient(t, s, redlatch.WithLogger(slog.New(slog.DiscardHandler)))
		r := mustLock(t, reading(holder, "orders"))
		inBackground(t.Context(), writing(dead, "orders"))
		harness.Waits(t, 1, dead)
		waiting := newCrowd(t)
		waiting.add(3, reading(c, "orders"))
		last := harness.PTTL(t, s.Addr, writerWaits)
		harness.Eventually(t, rwlock.WriterPause+slack, "the writer renews its registration", func() bool {
			before := last
			last = harness.PTTL(t, s.Addr, writerWaits)
			require.Positive(t, last)
			return last > before
		})
		require.Empty(t, waiting.entered)

		g.Stall() // and it is dead to the server
		waiting.allIn(rwlock.WriterLife + slack)
		require.False(t, exists(t, s, writerWaits))
		unlock(t, r)
		waiting.out()
		harness.NothingLeft(t, s.Addr)
	})
}

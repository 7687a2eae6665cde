package rlock_test

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
)

// relayed are the kinds whose claims are passed on inside a process as they are.
var relayed = map[string]func(c *redlatch.Client) harness.Lock{
	"lock":  func(c *redlatch.Client) harness.Lock { return c.Lock("orders") },
	"spin":  func(c *redlatch.Client) harness.Lock { return c.SpinLock("orders") },
	"plain": func(c *redlatch.Client) harness.Lock { return c.PlainLock("orders") },
}

func eachRelayed(t *testing.T, test func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for kind, of := range relayed {
			t.Run(kind, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				test(t, s, of)
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

func TestManyHoldsShareTheirRequests(t *testing.T) {
	eachRelayed(t, func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock) {
		const goroutines, rounds = 32, 100
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		harness.WarmUp(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		var wg sync.WaitGroup
		counter := 0 // which only the lock protects
		for range goroutines {
			wg.Go(func() {
				for range rounds {
					assert.NoError(t, of(c).Do(context.Background(), func(context.Context) error {
						counter++
						return nil
					}))
				}
			})
		}
		wg.Wait()
		require.Equal(t, goroutines*rounds, counter)
		// One request for each hold at most, and two in the place of each 17th.
		require.LessOrEqual(t, harness.Commands(t, conn)["evalsha"], goroutines*rounds*12/10)
	})
}

// relay has two holds of c after one another, with replies kept back after the first was
// acquired: the second has the lock before the first is told. That is a matter of time, and
// is tried until it happens. between is called while the first holds.
func relay(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock, fate harness.Fate, between func(first lock.Hold),
	then func(g *harness.Gate, first, second lock.Hold, unlocked <-chan error)) {
	t.Helper()
	done := false
	harness.Eventually(t, 20*time.Second, "a claim is passed on as it is", func() bool {
		c, g := harness.GatedClient(t, s)
		defer c.Close()
		other := mustLock(t, of(harness.Client(t, s)), lock.Lease(time.Minute))
		holds := make(chan lock.Hold, 2)
		for range 2 {
			go func() {
				h, err := of(c).Lock(context.Background())
				assert.NoError(t, err)
				holds <- h
			}()
		}
		asleep(t, s, 0)
		harness.Eventually(t, 5*time.Second, "both wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == 2 })
		require.NoError(t, other.Unlock(t.Context()))
		first := <-holds
		require.NotNil(t, first)
		between(first)
		reached := g.Arm(fate, "EVALSHA", 1)
		unlocked := make(chan error, 1)
		go func() { unlocked <- first.Unlock(context.Background()) }()
		<-reached
		select {
		case second := <-holds:
			require.NotNil(t, second)
			then(g, first, second, unlocked)
			done = true
		case err := <-unlocked: // too late: the server has passed it on
			require.NoError(t, err)
			require.NoError(t, (<-holds).Unlock(t.Context()))
		case <-time.After(100 * time.Millisecond):
			require.NoError(t, g.Open())
			<-unlocked
			_ = (<-holds).Unlock(t.Context())
		}
		return done
	})
}

func TestAClaimThatIsGoneIsLostByAllWhoHadIt(t *testing.T) {
	eachRelayed(t, func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock) {
		relay(t, s, of, harness.KeepReply,
			func(lock.Hold) { harness.Do(t, s.Addr, "DEL", "orders") },
			func(g *harness.Gate, _, second lock.Hold, unlocked <-chan error) {
				require.NoError(t, second.Context().Err(), "nobody knows yet")
				require.NoError(t, g.Open())
				require.ErrorIs(t, <-unlocked, lock.ErrLost)
				select {
				case <-second.Context().Done():
				case <-time.After(2 * time.Second): // well before it would be renewed
					require.Fail(t, "the next was not told")
				}
				require.ErrorIs(t, context.Cause(second.Context()), lock.ErrLost)
				require.ErrorIs(t, second.Unlock(t.Context()), lock.ErrLost)
			})
	})
}

func TestAClaimIsAskedForAgainIfTheAnswerIsLost(t *testing.T) {
	eachRelayed(t, func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock) {
		for _, fate := range harness.Fates {
			relay(t, s, of, fate, func(lock.Hold) {}, func(g *harness.Gate, _, second lock.Hold, unlocked <-chan error) {
				if !fate.Unknown() {
					require.NoError(t, g.Open())
				}
				if err := <-unlocked; err != nil { // not for longer than a release is tried
					require.Equal(t, harness.Silence, fate)
					require.ErrorIs(t, err, lock.ErrIndeterminate)
				}
				require.NoError(t, second.Unlock(t.Context()), fate)
				require.NoError(t, g.Open())
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

func TestNobodyLearnsTheOwnerOfAnother(t *testing.T) {
	eachRelayed(t, func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock) {
		relay(t, s, of, harness.KeepReply, func(lock.Hold) {}, func(g *harness.Gate, first, second lock.Hold, unlocked <-chan error) {
			former := first.Owner()
			require.NotEqual(t, second.Owner(), former)
			require.Equal(t, former, first.Owner())
			require.NoError(t, g.Open())
			require.NoError(t, <-unlocked)
			viewer := harness.Client(t, s)
			require.Equal(t, 1, harness.HoldCount(t, of(viewer), second.Owner()))
			require.Zero(t, harness.HoldCount(t, of(viewer), former))
			require.ErrorIs(t, of(viewer).(interface {
				Unlock(ctx context.Context) error
			}).Unlock(lock.WithOwner(t.Context(), former)), lock.ErrNotHeld)
			require.NoError(t, second.Unlock(t.Context()))
		})
	})
}

// What is the hold's own is passed on by the server, and then the next owner is another.
func TestWhatIsNotPassedOnAsItIs(t *testing.T) {
	for what, of := range map[string]struct {
		first  []lock.Option
		second []lock.Option
		use    func(h lock.Hold)
	}{
		"its owner is known":     {use: func(h lock.Hold) { _ = h.Owner() }},
		"it was extended":        {use: func(h lock.Hold) { _ = h.Extend(context.Background(), time.Hour) }},
		"it has a lease":         {first: []lock.Option{lock.Lease(time.Minute)}},
		"the next wants a lease": {second: []lock.Option{lock.Lease(time.Minute)}},
	} {
		t.Run(what, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				c, g := harness.GatedClient(t, s)
				harness.WarmUp(t, s.Addr)
				l := c.Lock("orders")
				// Held since just now by a hold that was acquired by an attempt, and waited for.
				for range 5 {
					var first, second lock.Hold
					other := mustLock(t, harness.Client(t, s).Lock("orders"), lock.Lease(time.Minute))
					got, next := make(chan lock.Hold, 1), make(chan lock.Hold, 1)
					wait := func(to chan lock.Hold, opts []lock.Option, waiters int) {
						go func() {
							h, err := l.Lock(context.Background(), opts...)
							assert.NoError(t, err)
							to <- h
						}()
						harness.Eventually(t, 5*time.Second, "it waits", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == waiters })
					}
					wait(got, of.first, 1)
					wait(next, of.second, 2)
					require.NoError(t, other.Unlock(t.Context()))
					first = <-got
					require.NotNil(t, first)
					if of.use != nil {
						of.use(first)
					}
					reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
					unlocked := make(chan error, 1)
					go func() { unlocked <- first.Unlock(context.Background()) }()
					<-reached
					select {
					case <-next:
						require.Fail(t, "the next has it before the server has said so")
					case <-time.After(20 * time.Millisecond):
					}
					require.NoError(t, g.Open())
					require.NoError(t, <-unlocked)
					second = <-next
					require.NotNil(t, second)
					require.NotEqual(t, first.Owner(), second.Owner())
					require.NoError(t, second.Unlock(t.Context()))
				}
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

// A server that does not answer is believed for a moment only.
func TestAClaimIsNotPassedOnForLongWithoutAnAnswer(t *testing.T) {
	eachRelayed(t, func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client) harness.Lock) {
		const waiters, each = 12, 5 * time.Millisecond
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		other := mustLock(t, of(harness.Client(t, s)), lock.Lease(time.Minute))
		held := make(chan struct{}, waiters)
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() {
				assert.NoError(t, of(c).Do(context.Background(), func(context.Context) error {
					held <- struct{}{}
					time.Sleep(each)
					return nil
				}))
			})
		}
		harness.Eventually(t, 5*time.Second, "all wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == waiters })
		require.NoError(t, other.Unlock(t.Context()))
		<-held
		<-g.Arm(harness.KeepReply, "EVALSHA", 1)
		<-time.After(waiters * each)
		// Each had it for 5 ms at least, and 20 ms after the request of the last answer it
		// is not passed on any more.
		require.LessOrEqual(t, len(held), 5)
		require.NoError(t, g.Open())
		wg.Wait()
	})
}

// Owner is called while Unlock is: whoever learns an owner does not learn that of another.
func TestNobodyLearnsTheOwnerOfAnotherAtTheLastMoment(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const goroutines, rounds = 16, 300
		c := harness.Client(t, s)
		var (
			mu    sync.Mutex
			shown = make(map[lock.Owner]bool)
			wg    sync.WaitGroup
		)
		for range goroutines {
			wg.Go(func() {
				for range rounds {
					h, err := c.Lock("orders").Lock(context.Background())
					if !assert.NoError(t, err) {
						return
					}
					asked := make(chan struct{})
					go func() {
						o := h.Owner()
						mu.Lock()
						assert.False(t, shown[o], "%v was shown to two", o)
						shown[o] = true
						mu.Unlock()
						close(asked)
					}()
					assert.NoError(t, h.Unlock(context.Background()))
					<-asked
				}
			})
		}
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}

package rlock_test

import (
	"context"
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

// soon bounds what takes a few round trips, on a busy machine.
const soon = 10 * time.Second

// cohortKind is a kind whose claims are passed on inside a process as they are.
type cohortKind struct {
	name    string
	of      func(c *redlatch.Client) harness.Lock
	confirm string // the script that asks whether a claim was there when it was passed on
}

// eachCohortKind runs a test for every such kind on every server.
func eachCohortKind(t *testing.T, test func(t *testing.T, s *testserver.Server, k cohortKind)) {
	harness.EachOf(t, []cohortKind{
		{"lock", func(c *redlatch.Client) harness.Lock { return c.Lock("orders") }, "../internal/engine/extend.lua"},
		{"plain", func(c *redlatch.Client) harness.Lock { return c.PlainLock("orders") }, "plain_extend.lua"},
	}, func(k cohortKind) string { return k.name }, func(t *testing.T, s *testserver.Server, k cohortKind) {
		harness.WarmUp(t, s.Addr)
		k.confirm = harness.SHA(t, k.confirm)
		test(t, s, k)
		harness.NothingLeft(t, s.Addr)
	})
}

// pass has two holds of a client after one another. The fault happens to the request by
// which the first asks whether its claim was there when it was passed on: the second has
// the lock by then. A claim is passed on before the question for a moment only, so this is tried
// until it is. between is called while the first holds.
func (k cohortKind) pass(t *testing.T, s *testserver.Server, fault harness.Fault, between func(first lock.Hold),
	then func(g *harness.Gate, first, second lock.Hold, unlocked <-chan error)) {
	t.Helper()
	c, g := harness.GatedClient(t, s)
	far := k.of(harness.Client(t, s))
	for deadline := time.Now().Add(2 * soon); ; {
		other := mustLock(t, far, lock.Lease(time.Minute))
		holds := make(chan lock.Hold, 2)
		for range 2 {
			go func() {
				h, err := k.of(c).Lock(context.Background())
				assert.NoError(t, err)
				holds <- h
			}()
		}
		harness.Waits(t, 2, c)
		reached := g.Arm(fault, k.confirm, 1)
		require.NoError(t, other.Unlock(t.Context()))
		first := harness.Receive(t, soon, "the first hold", holds)
		require.NotNil(t, first)
		between(first)
		unlocked := make(chan error, 1)
		go func() { unlocked <- first.Unlock(context.Background()) }()
		select {
		case <-reached:
		case err := <-unlocked:
			unlocked <- err
		}
		var second lock.Hold
		select {
		case second = <-holds:
		case <-time.After(time.Second): // the question came first
		}
		select {
		case <-reached:
			// A waiter for whom the question came first gets a claim of its own when the first is gone.
			if second != nil && lock.OwnerOf(second) == lock.OwnerOf(first) {
				then(g, first, second, unlocked)
				return
			}
		default:
		}
		require.NoError(t, g.Open())
		if second == nil {
			second = harness.Receive(t, soon, "the second hold", holds)
		}
		require.NoError(t, second.Unlock(t.Context()))
		require.Less(t, time.Now(), deadline, "no claim is passed on as it is")
	}
}

func TestAClaimThatIsGoneIsLostByAllWhoHadIt(t *testing.T) {
	eachCohortKind(t, func(t *testing.T, s *testserver.Server, k cohortKind) {
		k.pass(t, s, harness.KeepReply,
			func(lock.Hold) { harness.Do(t, s.Addr, "DEL", "orders") },
			func(g *harness.Gate, _, second lock.Hold, unlocked <-chan error) {
				require.NoError(t, second.Context().Err(), "nobody knows yet")
				require.NoError(t, g.Open())
				require.ErrorIs(t, <-unlocked, lock.ErrLost)
				// Before Unlock returns, not when it would be renewed.
				require.ErrorIs(t, context.Cause(second.Context()), lock.ErrLost)
				require.ErrorIs(t, second.Unlock(t.Context()), lock.ErrLost)
			})
	})
}

func TestAClaimIsAskedForAgainIfTheAnswerIsLost(t *testing.T) {
	eachCohortKind(t, func(t *testing.T, s *testserver.Server, k cohortKind) {
		for _, fault := range harness.Faults {
			t.Run(fault.String(), func(t *testing.T) {
				t.Parallel()
				s := harness.Server(t, s.Program)
				harness.WarmUp(t, s.Addr)
				k.pass(t, s, fault, func(lock.Hold) {}, func(g *harness.Gate, _, second lock.Hold, unlocked <-chan error) {
					if !fault.Unknown() {
						require.NoError(t, g.Open())
					}
					if err := <-unlocked; err != nil { // not for longer than a release is tried
						require.Equal(t, harness.Silence, fault)
						require.ErrorIs(t, err, lock.ErrIndeterminate)
					}
					require.NoError(t, second.Unlock(t.Context()), fault)
					require.NoError(t, g.Open())
				})
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

// The server passes on what is the hold's own, and then the next owner is another.
func TestWhatIsNotPassedOnAsItIs(t *testing.T) {
	type row struct {
		what          string
		first, second []lock.Option
		use           func(h lock.Hold)
	}
	harness.EachOf(t, []row{
		{what: "it was extended", use: func(h lock.Hold) { _ = h.Extend(context.Background(), time.Hour) }},
		{what: "it has a lease", first: []lock.Option{lock.Lease(time.Minute)}},
		{what: "the next wants a lease", second: []lock.Option{lock.Lease(time.Minute)}},
	}, func(r row) string { return r.what }, func(t *testing.T, s *testserver.Server, r row) {
		harness.WarmUp(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		far := harness.Client(t, s).Lock("orders")
		// Held since just now by a hold that was acquired by an attempt, and waited for. Had
		// it been slow, the server would pass on any claim.
		for range 2 {
			other := mustLock(t, far, lock.Lease(time.Minute))
			var holds [2]chan lock.Hold
			for i, opts := range [][]lock.Option{r.first, r.second} {
				holds[i] = make(chan lock.Hold, 1)
				go func() {
					h, err := c.Lock("orders").Lock(context.Background(), opts...)
					assert.NoError(t, err)
					holds[i] <- h
				}()
				harness.Waits(t, i+1, c)
			}
			require.NoError(t, other.Unlock(t.Context()))
			first := harness.Receive(t, soon, "the first hold", holds[0])
			require.NotNil(t, first)
			if r.use != nil {
				r.use(first)
			}
			unlocked := make(chan error, 1)
			g.Keep(t, "EVALSHA", 1, func() { go func() { unlocked <- first.Unlock(context.Background()) }() })
			select {
			case <-holds[1]:
				require.Fail(t, "the next has it before the server has said so")
			case <-time.After(20 * time.Millisecond):
			}
			require.NoError(t, g.Open())
			require.NoError(t, <-unlocked)
			second := harness.Receive(t, soon, "the second hold", holds[1])
			require.NotNil(t, second)
			require.NotEqual(t, lock.OwnerOf(first), lock.OwnerOf(second))
			ttl := time.Duration(harness.PTTL(t, s.Addr, "orders")) * time.Millisecond
			require.LessOrEqual(t, second.Remaining(), ttl+time.Millisecond)
			require.NoError(t, second.Unlock(t.Context()))
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// trust is for how long the server's word is taken that a claim was there.
const trust = 20 * time.Millisecond

// The server's word that a claim was there is taken for a moment only. Callers hold a lock one after another,
// and the first request for a claim that was passed on gets no answer.
func TestAClaimIsNotPassedOnForLongWithoutAnAnswer(t *testing.T) {
	const waiters, each = 20, trust / 4
	eachCohortKind(t, func(t *testing.T, s *testserver.Server, k cohortKind) {
		c, g := harness.GatedClient(t, s)
		far := k.of(harness.Client(t, s))
		var begun atomic.Int32
		var ended chan struct{}
		for deadline, asked := time.Now().Add(2*soon), false; !asked; {
			require.Less(t, time.Now(), deadline, "no claim is passed on as it is")
			other := mustLock(t, far, lock.Lease(time.Minute))
			begun.Store(0)
			ended = make(chan struct{})
			var all sync.WaitGroup
			for range waiters {
				all.Go(func() {
					assert.NoError(t, k.of(c).Do(context.Background(), func(context.Context) error {
						begun.Add(1)
						time.Sleep(each)
						return nil
					}))
				})
			}
			go func() { all.Wait(); close(ended) }()
			harness.Waits(t, waiters, c)
			reached := g.Arm(harness.KeepReply, k.confirm, 1)
			require.NoError(t, other.Unlock(t.Context()))
			select {
			case <-reached:
				asked = true
			case <-ended: // too slow: the server has passed it on each time
				require.NoError(t, g.Open())
			}
		}

		atRequest := begun.Load()
		time.Sleep(waiters * each) // which would be enough for all of them
		// What was confirmed last was so before the request that has no answer. From then on
		// the claim is passed on for as long as it is trusted, once in the time that each
		// holds it. One hold may have been about to begin.
		require.LessOrEqual(t, begun.Load()-atRequest, int32(trust/each)+1)
		require.NoError(t, g.Open())
		harness.Receive(t, soon, "all have held the lock", ended)
	})
}

// A hold that got the lock from another of this process while it was being forced open is lost,
// too. A lock is passed on without a request for a moment only, so this is tried until it is.
func TestForceUnlockEndsHoldsGrantedMeanwhile(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		l := c.Lock("orders")
		for deadline := time.Now().Add(2 * soon); ; {
			first := mustLock(t, l)
			second := harness.StartLock(t, context.Background(), l)
			harness.Waits(t, 1, c)
			forced := make(chan error, 1)
			g.Keep(t, harness.SHA(t, "force_unlock.lua"), 1, func() {
				go func() {
					_, err := l.ForceUnlock(context.Background())
					forced <- err
				}()
			})
			unlocked := make(chan error, 1)
			go func() { unlocked <- first.Unlock(context.Background()) }()
			select {
			case <-second.Ended:
			case <-time.After(time.Second / 2):
			}
			passed := !second.Running()
			require.NoError(t, g.Open())
			require.NoError(t, harness.Receive(t, soon, "the lock is open", forced))
			require.ErrorIs(t, harness.Receive(t, soon, "the first ends", unlocked), lock.ErrLost)
			h := second.Got()
			if passed {
				require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				break
			}
			require.NoError(t, h.Unlock(t.Context()))
			require.Less(t, time.Now(), deadline, "the lock is never passed on")
		}
		harness.NothingLeft(t, s.Addr)
	})
}

package interop

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

const (
	shortly = 50 * time.Millisecond // how long a timed attempt waits in vain
	long    = time.Hour             // of leases that must not matter
	slack   = time.Second           // on a busy machine
	// prompt bounds the wake-up by a release: half of our polling interval. Java does not poll while the
	// lease is long.
	prompt = 2500 * time.Millisecond
)

// promptly fails the test unless an attempt succeeds soon after a release that began at a time, and not before.
func (e *entry) promptly(t testing.TB, began time.Time) {
	t.Helper()
	at := e.gets(t, answers)
	require.False(t, at.Before(began), "it did not wait")
	require.LessOrEqual(t, at.Sub(began), prompt)
}

// failsAfter fails the test unless an attempt waits for d and fails.
func (e *entry) failsAfter(t testing.TB, d time.Duration) {
	t.Helper()
	require.GreaterOrEqual(t, e.fails(t, answers).Sub(e.began), d-time.Millisecond)
}

func TestSidesExcludeEachOther(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				held, same, theirs := first.lock(kind, name), second.lock(kind, name), second.lock(rival(kind), name)
				began := time.Now()
				held.take(t, 1, 0, time.Minute).gets(t, answers)
				for _, d := range []view{held, same} {
					require.True(t, d.locked(t))
					ttl := d.ttl(t)
					require.LessOrEqual(t, ttl, time.Minute)
					require.GreaterOrEqual(t, ttl, time.Minute-time.Since(began)-time.Millisecond)
				}
				require.ErrorIs(t, same.release(t, 1), lock.ErrNotHeld)

				theirs.take(t, 1, 0, 0).fails(t, answers)
				theirs.take(t, 1, shortly, 0).failsAfter(t, shortly)
				theirs.take(t, 1, shortly, time.Minute).fails(t, answers)
				require.True(t, held.locked(t))
				require.NoError(t, held.release(t, 1))

				// It waits: a waiter of a fair lock gives up its queue position just after it has returned.
				theirs.take(t, 1, answers, 0).gets(t, answers)
				require.NoError(t, theirs.release(t, 1))
				for _, d := range []view{held, theirs} {
					require.False(t, d.locked(t))
					require.Zero(t, d.ttl(t))
				}
			})
		})
	})
}

func TestReleaseWakesTheOtherSide(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			wakes := func(t *testing.T, kind, name, waits string, waiters uint64, force bool) {
				held, theirs := first.lock(kind, name), second.lock(waits, name)
				held.take(t, 1, 0, long).gets(t, answers)
				tried := p.watch(t, name)
				var waiting []*entry
				for thread := range waiters {
					waiting = append(waiting, theirs.take(t, 1+thread, forever, long))
				}
				tried.asleep(t, second, int(waiters))

				began := time.Now()
				if force {
					require.True(t, held.force(t))
				} else {
					require.NoError(t, held.release(t, 1))
				}
				for thread, e := range waiting {
					e.promptly(t, began)
					require.NoError(t, theirs.release(t, 1+uint64(thread)))
				}
			}
			p.eachKind(t, func(t *testing.T, kind, name string) {
				for _, force := range []bool{false, true} {
					wakes(t, kind, fmt.Sprint(name, force), rival(kind), 1, force)
					if kind == "write" {
						wakes(t, kind, fmt.Sprint(name, force, " of readers"), "read", 5, force)
					}
				}
			})
		})
	})
}

// No message tells of the end of a lease. Later calls of the first holder have no effect.
func TestAWaiterGetsInWhenTheLeaseOfTheOtherSideIsOver(t *testing.T) {
	harness.Full(t)
	const lease = 500 * time.Millisecond
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				lost := lock.ErrLost
				if _, java := first.(javaSide); java {
					lost = lock.ErrNotHeld
				} else if p.version == latchless && kind == "fair" {
					return // its waiter relies on messages
				}
				held, theirs := first.lock(kind, name), second.lock(rival(kind), name)
				called := time.Now()
				held.take(t, 1, 0, lease).gets(t, answers)
				begun := time.Now()

				at := theirs.take(t, 1, forever, time.Minute).gets(t, answers)
				require.GreaterOrEqual(t, at.Sub(called), lease-5*time.Millisecond)
				require.Less(t, at.Sub(begun), lease+slack)

				require.ErrorIs(t, held.release(t, 1), lost)
				require.Greater(t, theirs.ttl(t), 40*time.Second)
				require.NoError(t, theirs.release(t, 1))
			})
		})
	})
}

// Readers of both sides share a lock for many renewals, although each renews for its own time. Before 4.4 a
// renewal of Java sets the expiry of all holds, so there the times are equal.
func TestReadersOfBothSidesAreRenewed(t *testing.T) {
	harness.Full(t)
	const shorter, longer = 1500 * time.Millisecond, 3 * time.Second
	eachEnv(t, func(t *testing.T, p *env) {
		for _, watchdogs := range [][2]time.Duration{{shorter, shorter}, {shorter, longer}, {longer, shorter}} {
			if p.version != newest && watchdogs[0] != watchdogs[1] {
				continue
			}
			for first := range 2 {
				t.Run(fmt.Sprintf("%v, %d leaves first", watchdogs, first), func(t *testing.T) {
					t.Parallel()
					sides := []side{
						goSide{p.ours(t, redlatch.WithWatchdogTimeout(watchdogs[0])), first == 0},
						javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", watchdogs[1].Milliseconds()))},
					}
					name := "orders of " + t.Name()
					var readers []view
					for _, s := range sides {
						readers = append(readers, s.lock("read", name))
						readers[len(readers)-1].take(t, 1, 0, 0).gets(t, answers)
					}
					staysLocked := func(d time.Duration) {
						t.Helper()
						for end := time.Now().Add(d); time.Now().Before(end); {
							for _, s := range sides {
								s.lock("write", name).take(t, 2, shortly, 0).fails(t, answers)
							}
						}
					}

					staysLocked(2 * longer)
					require.NoError(t, readers[first].release(t, 1))
					staysLocked(longer)
					require.NoError(t, readers[1-first].release(t, 1))
					sides[1-first].lock("write", name).take(t, 1, 0, 0).gets(t, answers)
				})
			}
		}
	})
}

// A thread of Java that holds a lock more than once is an owner like any other, except that Go cannot act as it.
// Fencing tokens are one sequence.
func TestGoSeesTheHoldsOfJava(t *testing.T) {
	harness.Full(t)
	eachEnv(t, func(t *testing.T, p *env) {
		ours, java := p.ours(t), p.theirs(t)
		thread, err := lock.NewOwner(java.id, 1)
		require.NoError(t, err)
		asThread := lock.WithOwner(t.Context(), thread)
		for _, kind := range []string{"lock", "fenced", "spin", "fair", "read", "write"} {
			l, theirs := goLock(ours, kind, "orders of "+kind), javaSide{java}.lock(kind, "orders of "+kind)
			require.Zero(t, harness.HoldCount(t, l, thread), kind)
			for n := range 2 {
				theirs.take(t, 1, 0, long).gets(t, answers)
				require.Equal(t, n+1, harness.HoldCount(t, l, thread), kind)
			}
			_, err := goLock(ours, rival(kind), "orders of "+kind).TryLock(asThread)
			require.ErrorIs(t, err, lock.ErrNotAcquired, kind)
			require.ErrorIs(t, l.UnlockOwner(asThread), lock.ErrNotHeld, kind)
			for n := range 2 {
				require.NoError(t, theirs.release(t, 1), kind)
				require.Equal(t, 1-n, harness.HoldCount(t, l, thread), kind)
			}
		}

		for token := int64(3); token < 8; token += 3 { // after the two above
			h, err := ours.FencedLock("orders of fenced").TryLock(t.Context())
			require.NoError(t, err)
			require.Equal(t, token, h.Token())
			require.NoError(t, h.Unlock(t.Context()))
			for again := range int64(2) { // it re-enters
				var theirs int64
				java.on(t, "fenced", "orders of fenced", "tryLockAndGetTokenAsync", 0, long.Milliseconds(), ms, 1).must(t, &theirs)
				require.Equal(t, token+1+again, theirs)
			}
			require.True(t, javaSide{java}.lock("fenced", "orders of fenced").force(t))
		}

		last, err := ours.FencedLock("orders of fenced").RaiseTokens(t.Context(), 1<<53-100)
		require.NoError(t, err)
		var theirs int64
		java.on(t, "fenced", "orders of fenced", "tryLockAndGetTokenAsync", 0, long.Milliseconds(), ms, 1).must(t, &theirs)
		require.Equal(t, last+1, theirs)
	})
}

// An election waits for the fair lock of its name, and nobody leads while Java holds that.
func TestElectionBesideAFairLockOfJava(t *testing.T) {
	harness.Full(t)
	eachEnv(t, func(t *testing.T, p *env) {
		c := p.ours(t)
		e, held := c.Election("orders"), javaSide{p.theirs(t)}.lock("fair", "orders")
		held.take(t, 1, 0, long).gets(t, answers)
		_, err := e.Leader(t.Context())
		require.ErrorIs(t, err, election.ErrNoLeader)
		candidate := harness.Start(t, t.Context(), func(ctx context.Context) (*election.Term, error) { return e.Campaign(ctx, "") })
		harness.Eventually(t, answers, "the candidate waits", func() bool {
			waiters, err := c.FairLock("orders").Queue(t.Context())
			return err == nil && len(waiters) == 1
		})

		began := time.Now()
		require.NoError(t, held.release(t, 1))
		term := candidate.Got()
		require.Less(t, candidate.At.Sub(began), prompt)
		held.take(t, 1, 0, 0).fails(t, answers)
		leader, err := e.Leader(t.Context())
		require.NoError(t, err)
		require.Equal(t, term.Owner(), leader.Owner)
		require.NoError(t, term.Resign(t.Context()))
		held.take(t, 1, 0, 0).gets(t, answers)
	})
}

// contender wants an object again and again.
type contender struct {
	side   int
	shares bool // with others that do
	take   func() *entry
	give   func() error
	e      *entry
}

// Waiters of several clients of both sides contend for each kind of lock and for permits until every client
// has had enough turns. At no time there are too many holders. Only of spin locks the shares vary widely. Java
// has one reader: several that overlap would keep writers in Go waiting.
func TestManyOfBothSidesContend(t *testing.T) {
	harness.Full(t)
	const threads, turns, limit = 4, 10, 3
	eachEnv(t, func(t *testing.T, p *env) {
		contend := func(t *testing.T, all []*contender, limit, most int) (fewest int) {
			for _, c := range all {
				c.e = c.take()
			}
			had := make([]int, 1+slices.MaxFunc(all, func(a, b *contender) int { return a.side - b.side }).side)
			for round := 0; round < most && slices.Min(had) < turns; round++ {
				i := -1
				harness.Eventually(t, answers, "one of them gets in", func() bool {
					i = slices.IndexFunc(all, func(c *contender) bool { return c.e.ended() })
					return i >= 0
				})
				next := all[i]
				all = append(slices.Delete(all, i, i+1), next) // the others come first
				next.e.gets(t, answers)
				holders := 1
				for _, c := range all[:len(all)-1] {
					if c.e.ended() {
						require.True(t, next.shares && c.shares || limit > 1, "the lock has two holders")
						holders++
					}
				}
				if limit > 1 {
					require.LessOrEqual(t, holders, limit)
				}
				had[next.side]++
				require.NoError(t, next.give())
				next.e = next.take()
			}
			t.Logf("the turns of each client: %v", had)
			return slices.Min(had)
		}
		sides := func(t *testing.T) []side {
			return []side{goSide{p.ours(t), false}, goSide{p.ours(t), true}, javaSide{p.theirs(t)}, javaSide{p.theirs(t)}}
		}
		p.eachKind(t, func(t *testing.T, kind, name string) {
			var all []*contender
			for i, s := range sides(t) {
				for thread := uint64(1); thread <= threads; thread++ {
					c := &contender{side: i, shares: kind == "read" && (i < 2 && thread > 1 || i == 3 && thread == 4)}
					d := s.lock(kind, name)
					if kind == "read" && !c.shares {
						d = s.lock("write", name)
					}
					c.take = func() *entry { return d.take(t, thread, forever, 0) }
					c.give = func() error { return d.release(t, thread) }
					all = append(all, c)
				}
			}
			if kind == "spin" {
				contend(t, all, 1, 500)
				return
			}
			require.GreaterOrEqual(t, contend(t, all, 1, 4000), turns)
		})
		p.eachPool(t, func(t *testing.T, kind, name string) {
			var all []*contender
			for i, s := range sides(t) {
				of := poolOf(t, s, kind, name)
				of.set(limit)
				for range threads {
					c := &contender{side: i}
					var got *permitAttempt
					c.take = func() *entry {
						got = of.take(1, forever, long)
						return got.entry
					}
					c.give = func() error { return of.give(1, got.ids...) }
					all = append(all, c)
				}
			}
			require.GreaterOrEqual(t, contend(t, all, limit, 4000), turns)
		})
	})
}

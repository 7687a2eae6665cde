package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// reentrant reports whether an owner can hold such a lock more than once.
func reentrant(kind string) bool { return !strings.HasPrefix(kind, "non-reentrant") }

func TestSidesSeeTheSameLock(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		conn := p.conn(t)
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				held, theirs := first.lock(kind, name), second.lock(kind, name)
				doors := []view{held, theirs}
				look := func(holds int) {
					for _, d := range doors {
						require.Equal(t, holds > 0, d.locked(t))
						before := do(t, conn, "PTTL", name)
						ttl := d.ttl(t).Milliseconds()
						after := do(t, conn, "PTTL", name)
						most, err := before.AsInt64()
						require.NoError(t, err)
						least, err := after.AsInt64()
						require.NoError(t, err)
						require.LessOrEqual(t, ttl, max(most, 0))
						require.GreaterOrEqual(t, ttl, max(least, 0))
					}
					require.Equal(t, holds, held.holds(t, 1))
					require.Zero(t, theirs.holds(t, 1)) // as another client
					// Java cannot be asked about owners of other clients.
					if ours, ok := theirs.(*goView); ok {
						owner, err := lock.NewOwner(first.id(), commander)
						require.NoError(t, err)
						n, err := ours.l.HoldCount(context.Background(), owner)
						require.NoError(t, err)
						require.Equal(t, holds, n)
						is, err := ours.l.IsHeldBy(context.Background(), owner)
						require.NoError(t, err)
						require.Equal(t, holds > 0, is)
						// Go cannot act as an owner of another client.
						asJava := lock.WithOwner(context.Background(), owner)
						require.ErrorIs(t, ours.l.Unlock(asJava), lock.ErrNotHeld)
						if holds > 0 {
							_, err = goLock(ours.side.c, rival(kind), name).TryLock(asJava)
							require.ErrorIs(t, err, lock.ErrNotAcquired)
						}
					}
				}
				look(0)
				began := time.Now()
				held.take(t, 1, 0, time.Minute).gets(t, answers)
				ttl := theirs.ttl(t)
				require.LessOrEqual(t, ttl, time.Minute)
				require.GreaterOrEqual(t, ttl, time.Minute-time.Since(began)-time.Millisecond)
				require.ErrorIs(t, theirs.release(t, 1), lock.ErrNotHeld)
				look(1)
				if s, ours := first.(goSide); reentrant(kind) && (!ours || s.named) {
					held.take(t, 1, 0, time.Minute).gets(t, answers)
					look(2)
					require.NoError(t, held.release(t, 1))
					look(1)
				}
				require.NoError(t, held.release(t, 1))
				look(0)
			})
		})
	})
}

func TestSidesSeeTheSameReadWriteLock(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			name := "orders of " + t.Name()
			read, write := first.lock("read", name), first.lock("write", name)
			look := func(reads, writes bool) {
				for _, s := range []side{first, second} {
					if _, java := s.(javaSide); java && p.version == latchless && writes {
						continue // it takes a write-locked lock for a read-locked one
					}
					require.Equal(t, reads, s.lock("read", name).locked(t), s)
					require.Equal(t, writes, s.lock("write", name).locked(t), s)
				}
			}
			look(false, false)
			read.take(t, 1, 0, long).gets(t, answers)
			look(true, false)
			theirs := second.lock("read", name)
			theirs.take(t, 1, 0, long).gets(t, answers) // they share it
			require.NoError(t, read.release(t, 1))
			look(true, false)
			require.False(t, write.force(t))
			require.True(t, read.force(t))
			look(false, false)
			write.take(t, 1, 0, long).gets(t, answers)
			look(false, true)
			require.False(t, theirs.force(t)) // which concerns readers
			theirs.take(t, 1, 0, long).fails(t, answers)
			if s, ours := first.(goSide); !ours || s.named {
				read.take(t, 1, 0, long).gets(t, answers)
				look(true, true)
				require.NoError(t, write.release(t, 1))
				look(true, false)
				require.NoError(t, read.release(t, 1))
			} else {
				require.NoError(t, write.release(t, 1))
			}
			look(false, false)
		})
	})
}

func TestFencingTokensAreOneSequence(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		java, ours := p.theirs(t), p.ours(t)
		const name = "orders"
		fenced := ours.FencedLock(name)
		for token := int64(1); token < 9; token += 4 {
			h, err := fenced.TryLock(context.Background())
			require.NoError(t, err)
			require.Equal(t, token, h.Token())
			require.NoError(t, h.Unlock(context.Background()))
			var theirs int64
			for again := range int64(2) { // it re-enters
				java.on(t, "fenced", name, "tryLockAndGetTokenAsync", 0, long.Milliseconds(), ms, 1).must(t, &theirs)
				require.Equal(t, token+1+again, theirs)
			}
			d := javaSide{java}.lock("fenced", name)
			d.take(t, 1, 0, long).gets(t, answers) // and does not read the token
			java.on(t, "fenced", name, "getTokenAsync").must(t, &theirs)
			require.Equal(t, token+3, theirs)
			for range 3 {
				require.NoError(t, d.release(t, 1))
			}
		}
	})
}

func TestQueueShowsWaitersOfBothSides(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		java, ours := javaSide{p.theirs(t)}, goSide{p.ours(t), true}
		for _, kind := range []string{"fair", "non-reentrant fair"} {
			if !has(p.version, kind) {
				continue
			}
			name := "orders of " + kind
			doors := map[side]view{java: java.lock(kind, name), ours: ours.lock(kind, name)}
			doors[java].take(t, 9, 0, long).gets(t, answers)
			var owners []lock.Owner
			var waiting []*entry
			for i, s := range []side{java, ours, ours, java} {
				thread := uint64(i)
				waiting = append(waiting, doors[s].take(t, thread, forever, long))
				queue := queued(t, ours.c, name, len(waiting))
				owner := queue[i].Owner
				require.True(t, strings.HasPrefix(owner.String(), s.id()))
				if s == side(java) {
					require.Equal(t, fmt.Sprint(java.id(), ":", thread), owner.String())
				}
				owners = append(owners, owner)
				for i, w := range queue {
					require.Equal(t, owners[i], w.Owner)
					require.True(t, w.Deadline.After(time.Now()))
				}
			}
			for _, d := range doors {
				d.take(t, 7, 0, 0).fails(t, answers) // it does not queue
			}
			queued(t, ours.c, name, len(owners))
			// A waiter that gives up leaves the queue to the others.
			doors[java].take(t, 8, shortly, long).fails(t, answers)
			waiting[2].cancel()
			_, _, err := waiting[2].outcome(t, answers)
			require.ErrorIs(t, err, errCancelled)
			queue := queued(t, ours.c, name, 3)
			require.Equal(t, owners[3], queue[2].Owner)
			require.NoError(t, doors[java].release(t, 9))
			for i, s := range []side{java, ours, nil, java} {
				if s != nil {
					waiting[i].gets(t, answers)
					require.NoError(t, doors[s].release(t, uint64(i)))
				}
			}
		}
	})
}

func TestSidesSeeTheSamePermits(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			name := "orders of " + t.Name()
			mine, theirs := poolOf(first, "semaphore", name), poolOf(second, "semaphore", name)
			look := func(n int) {
				require.Equal(t, []int{n, n}, []int{mine.free(t), theirs.free(t)})
			}
			look(0)
			require.True(t, mine.set(t, 5))
			look(5)
			mine.take(t, 2, 0, long).gets(t, answers)
			look(3)
			ctx := context.Background()
			switch p := mine.(type) {
			case goNumber:
				require.NoError(t, p.s.AddPermits(ctx, -4))
				look(-1)
				require.NoError(t, p.s.AddPermits(ctx, 4))
				drained, err := p.s.Drain(ctx)
				require.NoError(t, err)
				require.Equal(t, 3, drained)
			case *javaPool:
				p.call(t, "addPermitsAsync", -4).must(t, nil)
				look(-1)
				p.call(t, "addPermitsAsync", 4).must(t, nil)
				var drained int
				p.call(t, "drainPermitsAsync").must(t, &drained)
				require.Equal(t, 3, drained)
			}
			look(0)
			require.NoError(t, theirs.give(t, 4))
			look(4)
		})
	})
}

func TestSidesSeeTheSamePermitsWithLeases(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		java, ours := p.theirs(t), p.ours(t)
		ctx := context.Background()
		const name = "orders"
		e, theirs := ours.PermitSemaphore(name), poolOf(javaSide{java}, "permits", name).(*javaPool)
		type counts struct{ free, all, taken int }
		look := func(want counts) {
			var c [2]counts
			var err error
			c[0].free, err = e.Available(ctx)
			require.NoError(t, err)
			stats, err := e.Stats(ctx)
			require.NoError(t, err)
			c[0].all, c[0].taken = stats.Total, stats.Taken
			theirs.call(t, "availablePermitsAsync").must(t, &c[1].free)
			theirs.call(t, "getPermitsAsync").must(t, &c[1].all)
			theirs.call(t, "acquiredPermitsAsync").must(t, &c[1].taken)
			require.Equal(t, [2]counts{want, want}, c)
		}
		// left reads the lease of a permit from both sides. Java uses its own clock, which is
		// also that of the server here.
		left := func(id string, most time.Duration, began time.Time) {
			const slip = 50 * time.Millisecond
			lease := map[string]time.Duration{}
			var err error
			lease["Go"], err = e.LeaseTime(ctx, id)
			require.NoError(t, err)
			if p.version != latchless { // which cannot be asked
				var n int64
				theirs.call(t, "getLeaseTimeAsync", id).must(t, &n)
				lease["Java"] = time.Duration(n) * time.Millisecond
			}
			least := most - time.Since(began) - slip
			for who, d := range lease {
				require.LessOrEqual(t, d, most+slip, who)
				require.GreaterOrEqual(t, d, least, who)
			}
		}
		set, err := e.TrySetPermits(ctx, 5)
		require.NoError(t, err)
		require.True(t, set)
		look(counts{5, 5, 0})

		began := time.Now()
		permit, err := e.TryAcquire(ctx, lock.Lease(time.Minute))
		require.NoError(t, err)
		look(counts{4, 5, 1})
		left(permit.ID(), time.Minute, began)
		began = time.Now()
		var updated bool
		theirs.call(t, "updateLeaseTimeAsync", permit.ID(), 2*time.Minute.Milliseconds(), ms).must(t, &updated)
		require.True(t, updated)
		left(permit.ID(), 2*time.Minute, began)

		began = time.Now()
		tk := theirs.take(t, 1, 0, long)
		tk.gets(t, answers)
		look(counts{3, 5, 2})
		left(tk.ids[0], long, began)
		began = time.Now()
		updated, err = e.UpdateLeaseTime(ctx, tk.ids[0], 3*time.Minute)
		require.NoError(t, err)
		require.True(t, updated)
		left(tk.ids[0], 3*time.Minute, began)

		// Permits that never expire.
		a, err := theirs.call(t, "tryAcquireAsync", 0, ms).within(t, answers)
		require.NoError(t, err)
		var id string
		require.NoError(t, json.Unmarshal(a.Value, &id))
		lease, err := e.LeaseTime(ctx, id)
		require.NoError(t, err)
		require.Equal(t, lock.NoExpiry, lease)

		require.NoError(t, e.SetPermits(ctx, 2))
		look(counts{-1, 2, 3})
		theirs.call(t, "addPermitsAsync", 4).must(t, nil)
		look(counts{3, 6, 3})
		theirs.call(t, "setPermitsAsync", 4).must(t, nil)
		look(counts{1, 4, 3})
		require.NoError(t, theirs.give(t, 1, permit.ID()))
		require.ErrorIs(t, permit.Extend(ctx, time.Hour), lock.ErrLost)
		require.NoError(t, e.Release(ctx, id, tk.ids[0]))
		look(counts{4, 4, 0})
	})
}

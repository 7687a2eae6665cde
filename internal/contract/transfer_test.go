package contract_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// adopter is what Detach can leave a lock to.
type adopter interface {
	Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error)
}

// detachable is for kinds whose holds Detach can leave to another process.
func detachable(k kind) bool { return k.owned || isPermit(k) }

func isPermit(k kind) bool { return k.leased && k.free != "" }

// unknownID returns an id under which nothing was detached.
func unknownID(k kind, c *redlatch.Client) string {
	if isPermit(k) {
		return strings.Repeat("0", 32) + "#1"
	}
	return c.NewOwner().String() + "#0"
}

// keeps is for kinds that have lock.AtLeast.
func keeps(k kind) bool { return k.leased && k.free == "" && !k.shared }

// With lock.AtLeast a lock stays held for that long, whenever it is unlocked, and no longer.
func TestAtLeast(t *testing.T) {
	eachVirtually(t, keeps, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t), s.Client(t)
		mine, theirs := k.of(c, "orders"), k.rival(other, "orders")
		most := time.Minute
		if k.polls && testing.Short() { // all the time
			most = 5 * time.Second
		}
		for _, least := range []time.Duration{200 * time.Millisecond, most} {
			for _, held := range []time.Duration{0, least / 2, least + 100*time.Millisecond} {
				for _, ctx := range k.owners(t, c) {
					h := mustLock(t, ctx, mine, lock.AtLeast(least))
					free := time.Now().Add(least)
					w := harness.StartLock(t, t.Context(), theirs)
					time.Sleep(held)
					require.NoError(t, h.Unlock(t.Context()))
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
					require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
					if held < least {
						time.Sleep(time.Until(free) - time.Millisecond)
						synctest.Wait()
						require.True(t, w.Running())
						isTaken(t, theirs)
					}
					got := w.Got()
					require.Less(t, time.Since(free), held+time.Second)
					if held < least {
						require.Less(t, time.Since(free), 600*time.Millisecond, "a Redlock polls")
					}
					require.NoError(t, got.Unlock(t.Context()))
				}
			}
		}
	})
}

// The last Unlock of an owner keeps the lock for as long as any of its holds needs, with one request.
func TestAtLeastOfAnInnerHold(t *testing.T) {
	eachVirtually(t, func(k kind) bool { return k.owned && keeps(k) }, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t), s.Client(t)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		calls := 0
		for range 2 { // the first round loads the scripts
			var holds []lock.Hold
			if !k.once {
				holds = append(holds, mustLock(t, ctx, k.of(c, "orders")))
			}
			holds = append(holds, mustLock(t, ctx, k.of(c, "orders"), lock.AtLeast(time.Second)))
			s.Reset()
			for _, h := range slices.Backward(holds) {
				require.NoError(t, h.Unlock(ctx))
			}
			calls = s.Calls("evalsha") + s.Calls("eval")
			time.Sleep(time.Second - time.Millisecond)
			isTaken(t, k.rival(other, "orders"))
			time.Sleep(2 * time.Millisecond)
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(0)))
		}
		require.Equal(t, 1, calls)
	})
}

// The reply to a request that leaves a lock held for a moment is lost, and the moment is over when the
// request is repeated. That is no loss of the lock.
func TestLostReplyOfAShortTransfer(t *testing.T) {
	const moment = session.MinPause / 2
	for name, end := range map[string]func(h lock.Hold) error{
		"AtLeast": func(h lock.Hold) error { return h.Unlock(context.Background()) },
		"Detach": func(h lock.Hold) error {
			_, err := lock.Detach(context.Background(), h, moment)
			return err
		},
		"Adopt": nil,
	} {
		t.Run(name, func(t *testing.T) {
			eachKind(t, func(k kind) bool { return k.owned && keeps(k) && detachable(k) }, func(t *testing.T, s *testserver.Server, k kind) {
				g := harness.NewGate(t, s)
				c := harness.ClientAt(t, []string{g.Addr})
				l := k.of(c, "orders")
				// Has the scripts loaded, also that of a release, which follows if the moment is over.
				require.NoError(t, l.Do(t.Context(), nothing))
				_, err := lock.Detach(t.Context(), mustLock(t, t.Context(), l), moment)
				require.NoError(t, err)
				if end == nil {
					id, detachErr := lock.Detach(t.Context(), mustLock(t, t.Context(), l), time.Minute)
					require.NoError(t, detachErr)
					g.During(t, harness.LoseReply, "EVALSHA", func() { _, err = l.(adopter).Adopt(t.Context(), id, lock.Lease(moment)) })
				} else {
					h := mustLock(t, t.Context(), l, lock.AtLeast(moment))
					g.During(t, harness.LoseReply, "EVALSHA", func() { err = end(h) })
				}
				require.ErrorIs(t, err, lock.ErrIndeterminate)
				require.NotErrorIs(t, err, lock.ErrLost)
				require.NotErrorIs(t, err, lock.ErrNotHeld)
				if k.timed {
					harness.Do(t, s.Addr, "DEL", "orders") // it lasts for the longest lease that there was
				}
			})
		})
	}
}

// A transfer whose lease is over when the script goes on, as a short one may be on a busy Redis 6.2, leaves
// no lock without an expiry.
func TestATransferThatIsOverAtOnceLeavesNothing(t *testing.T) {
	script, err := os.ReadFile("../../rlock/lua/transfer.lua")
	require.NoError(t, err)
	positions, err := os.ReadFile("../../fairlock/lua/positions.lua")
	require.NoError(t, err)
	fair, err := os.ReadFile("../../fairlock/lua/transfer.lua")
	require.NoError(t, err)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for name, call := range map[string][]string{
			"lock": {string(script), "1", "orders", "from", "to", "0", "", "", ""},
			"fair lock": {
				string(positions) + string(fair), "5", "orders", "list", "deadlines", "heartbeats", "order",
				"60000", "30000", "PUBLISH", "channel", "0", "from", "to", "0",
			},
		} {
			harness.Do(t, s.Addr, "HSET", "orders", "from", "1")
			harness.Do(t, s.Addr, "PEXPIRE", "orders", "60000")
			require.Equal(t, ":1", harness.Do(t, s.Addr, append([]string{"EVAL"}, call...)...), name)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"), name)
		}
	})
}

// A copy of a request that leaves a lock, or adopts it, arrives when its lease is partly over. It gives no
// more than is left, and takes nothing once the lock is free.
func TestACopyOfATransferArrivesLate(t *testing.T) {
	eachKind(t, func(k kind) bool { return k.owned }, func(t *testing.T, s *testserver.Server, k kind) {
		g := harness.NewGate(t, s)
		c := harness.ClientAt(t, []string{g.Addr})
		l := k.of(c, "orders")
		late := func(what string) {
			const delay = 300 * time.Millisecond
			ends := time.Duration(harness.PTTL(t, s.Addr, "orders")) * time.Millisecond
			asked := time.Now()
			time.Sleep(delay)
			require.NoError(t, g.Open())
			gone := time.Since(asked)
			require.Less(t, time.Duration(harness.PTTL(t, s.Addr, "orders"))*time.Millisecond, ends-gone+delay/2, what)
		}
		id, err := lock.Detach(t.Context(), mustLock(t, t.Context(), l), time.Minute) // has the scripts loaded
		require.NoError(t, err)
		h, err := l.(adopter).Adopt(t.Context(), id, lock.Lease(time.Minute))
		require.NoError(t, err)

		g.During(t, harness.Echo, "EVALSHA", func() { id, err = lock.Detach(t.Context(), h, time.Hour) })
		require.NoError(t, err)
		late("Detach")
		g.During(t, harness.Echo, "EVALSHA", func() { h, err = l.(adopter).Adopt(t.Context(), id, lock.Lease(time.Minute)) })
		require.NoError(t, err)
		late("Adopt")
		if keeps(k) {
			require.NoError(t, h.Unlock(t.Context()))
			h = mustLock(t, t.Context(), l, lock.AtLeast(time.Minute))
			g.During(t, harness.Echo, "EVALSHA", func() { require.NoError(t, h.Unlock(t.Context())) })
			late("Unlock with lock.AtLeast")
			harness.Do(t, s.Addr, "DEL", "orders")
			h = mustLock(t, t.Context(), l)
		}

		g.During(t, harness.Echo, "EVALSHA", func() { id, err = lock.Detach(t.Context(), h, time.Hour) })
		require.NoError(t, err)
		h, err = l.(adopter).Adopt(t.Context(), id)
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, g.Open())
		require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing, lock.Wait(0)))
	})
}

// An outage outlasts the request that gives a lock away. What was sent is lost, and the background repeats it.
// Of lock.AtLeast the time is over then. After a Detach without an answer the lock is left for no longer than
// the hold had it: the caller may have looked for it in vain before.
func TestTransferAndOutage(t *testing.T) {
	const timeout = 8 * time.Second // longer than Detach tries
	type row struct {
		kind
		least bool
	}
	rows := []row{{ofKind("lock"), false}, {ofKind("permit semaphore"), false}} // whose code the others share
	for _, k := range choose(func(k kind) bool { return k.owned && keeps(k) }) {
		rows = append(rows, row{k, true})
	}
	harness.EachOf(t, rows, func(r row) string { return fmt.Sprintf("%s at least %v", r.name, r.least) }, func(t *testing.T, s *testserver.Server, r row) {
		k := r.kind
		k.prepare(t, s.Addr, "orders")
		g := harness.NewGate(t, s)
		c := harness.ClientAt(t, []string{g.Addr}, redlatch.WithWatchdogTimeout(timeout))
		var opts []lock.Option
		if r.least {
			opts = append(opts, lock.AtLeast(time.Second))
		}
		h := mustLock(t, t.Context(), k.of(c, "orders"), opts...)
		g.Stall()
		var err error
		if r.least {
			err = h.Unlock(t.Context())
		} else {
			_, err = lock.Detach(t.Context(), h, time.Hour)
		}
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		g.Redirect(s)
		require.NoError(t, g.Open())
		require.NoError(t, k.rival(harness.Client(t, s), "orders").Do(t.Context(), nothing, lock.Wait(timeout+soon)))
	})
}

// Detach leaves a lock held, and exactly one caller adopts it, in whatever process.
func TestDetachAndAdopt(t *testing.T) {
	eachKind(t, detachable, func(t *testing.T, s *testserver.Server, k kind) {
		c, next := harness.Client(t, s), harness.Client(t, s)
		for _, ctx := range k.owners(t, c) {
			h := mustLock(t, ctx, k.of(c, "orders"))
			id, err := lock.Detach(t.Context(), h, time.Minute)
			require.NoError(t, err)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			_, err = lock.Detach(t.Context(), h, time.Minute)
			require.ErrorIs(t, err, lock.ErrNotHeld)
			require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
			require.Zero(t, h.Remaining())
			isTaken(t, k.rival(next, "orders"))
			if k.owned {
				require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(50_000))
			}

			var mu sync.Mutex
			var adopted []lock.Hold
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					switch h, err := k.of(next, "orders").(adopter).Adopt(t.Context(), id); {
					case err == nil:
						mu.Lock()
						adopted = append(adopted, h)
						mu.Unlock()
					default:
						require.ErrorIs(t, err, lock.ErrNotHeld)
					}
				})
			}
			wg.Wait()
			require.Len(t, adopted, 1)
			got := adopted[0]
			require.Equal(t, h.Token(), got.Token())
			if k.owned {
				require.NotEqual(t, lock.OwnerOf(h), lock.OwnerOf(got))
			}
			require.LessOrEqual(t, got.Remaining(), 30*time.Second)
			isTaken(t, k.rival(c, "orders"))
			require.NoError(t, got.Extend(t.Context(), time.Minute))

			// And on: what was adopted can be detached, for less than it had.
			id, err = lock.Detach(t.Context(), got, 200*time.Millisecond)
			require.NoError(t, err)
			require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing), "when the lease is over")
			_, err = k.of(next, "orders").(adopter).Adopt(t.Context(), id)
			require.ErrorIs(t, err, lock.ErrNotHeld)
		}
	})
}

// Several readers and the options of an acquisition.
func TestAdoptOptions(t *testing.T) {
	eachVirtually(t, detachable, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		l := k.of(c, "orders")
		adopt := func(lease time.Duration, opts ...lock.Option) lock.Hold {
			id, err := lock.Detach(t.Context(), mustLock(t, t.Context(), l), lease)
			require.NoError(t, err)
			h, err := l.(adopter).Adopt(t.Context(), id, harness.HoldOptions(opts)...)
			require.NoError(t, err)
			return h
		}
		renewed := adopt(time.Second)
		time.Sleep(time.Minute)
		require.NoError(t, renewed.Unlock(t.Context()))

		fixed := adopt(time.Minute, lock.Lease(time.Second))
		time.Sleep(1100 * time.Millisecond)
		require.ErrorIs(t, fixed.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing, lock.Wait(0)))

		limited := adopt(time.Minute, lock.MaxHold(2*time.Second))
		<-limited.Context().Done()
		require.ErrorIs(t, limited.Unlock(t.Context()), lock.ErrLost)

		type key struct{}
		with := adopt(time.Minute, lock.Parent(context.WithValue(t.Context(), key{}, 1)))
		require.Equal(t, 1, with.Context().Value(key{}))
		require.NoError(t, with.Unlock(t.Context()))
		if keeps(k) {
			require.NoError(t, adopt(time.Minute, lock.AtLeast(time.Second)).Unlock(t.Context()))
			isTaken(t, k.rival(c, "orders"))
			time.Sleep(time.Second)
		}

		if k.shared {
			first, second := adopt(time.Hour), mustLock(t, t.Context(), l)
			require.NoError(t, first.Unlock(t.Context()))
			isTaken(t, k.rival(c, "orders"))
			id, err := lock.Detach(t.Context(), second, time.Second)
			require.NoError(t, err)
			third := mustLock(t, t.Context(), l)
			time.Sleep(2 * time.Second)
			_, err = l.(adopter).Adopt(t.Context(), id)
			require.ErrorIs(t, err, lock.ErrNotHeld)
			require.NoError(t, third.Unlock(t.Context()))
		}
	})
}

// What was detached passes by the waiters of its process, which may have had the lock before.
func TestDetachWithWaiters(t *testing.T) {
	eachVirtually(t, detachable, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		l := k.of(c, "orders")
		h := mustLock(t, t.Context(), k.rival(c, "orders"))
		second := harness.StartLock(t, t.Context(), l)
		synctest.Wait()
		third := harness.StartLock(t, t.Context(), k.rival(c, "orders"))
		synctest.Wait()
		require.NoError(t, h.Unlock(t.Context())) // passes it on
		began := time.Now()
		id, err := lock.Detach(t.Context(), second.Got(), time.Second)
		require.NoError(t, err)
		require.NotEmpty(t, id)
		require.NoError(t, third.Got().Unlock(t.Context()))
		require.GreaterOrEqual(t, time.Since(began), time.Second)
		require.Less(t, time.Since(began), 1500*time.Millisecond)
	})
}

func TestInvalidDetachAndAdopt(t *testing.T) {
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		h := mustLock(t, t.Context(), l)
		detach := func(ctx context.Context, lease time.Duration) error { return only(lock.Detach(ctx, h, lease)) }
		var none context.Context
		if !detachable(k) {
			require.ErrorIs(t, detach(t.Context(), time.Minute), lock.ErrUnsupported)
			require.NoError(t, h.Unlock(t.Context()))
			return
		}
		for _, lease := range []time.Duration{-1, 0, time.Microsecond, lock.MaxLease + 1} {
			require.ErrorIs(t, detach(t.Context(), lease), lock.ErrInvalid)
		}
		require.ErrorIs(t, detach(none, time.Minute), lock.ErrInvalid)
		adopt := func(ctx context.Context, name, id string, opts ...lock.HoldOption) error {
			return only(k.of(c, name).(adopter).Adopt(ctx, id, opts...))
		}
		held := lock.OwnerOf(h).String()
		if p, ok := h.(permitHold); ok {
			held = p.ID()
		}
		require.ErrorIs(t, adopt(t.Context(), "orders", held), lock.ErrInvalid, "it is not detached")
		require.NoError(t, h.Unlock(t.Context()))
		if k.shared {
			require.ErrorIs(t, only(l.TryLock(t.Context(), lock.AtLeast(time.Second))), lock.ErrInvalid)
			require.ErrorIs(t, only(c.MultiLock(l).Lock(t.Context(), lock.AtLeast(time.Second))), lock.ErrInvalid)
		}

		digits := strings.Repeat("0", 32)
		for _, id := range []string{
			"", "x", c.ID(), c.ID() + ":", c.ID() + ":1", c.ID() + ":1#", c.ID() + ":1#-1", c.ID() + ":1#x",
			digits, digits + "#", digits + "#-1", digits + "#0", digits + "#10001", digits + "#x", digits + "00#1", digits[2:] + "#1",
		} {
			require.ErrorIs(t, adopt(t.Context(), "orders", id), lock.ErrInvalid, id)
		}
		unknown := unknownID(k, c)
		require.ErrorIs(t, adopt(t.Context(), "orders", unknown), lock.ErrNotHeld)
		require.ErrorIs(t, adopt(t.Context(), "", unknown), lock.ErrInvalid)
		if !keeps(k) {
			require.ErrorIs(t, adopt(t.Context(), "orders", unknown, lock.AtLeast(time.Second)), lock.ErrInvalid)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		err := adopt(ended, "orders", unknown)
		require.ErrorIs(t, err, lock.ErrUnavailable)
		require.ErrorIs(t, err, context.Canceled)

		if reentrant(k) {
			ctx := lock.WithOwner(t.Context(), c.NewOwner())
			outer, inner := mustLock(t, ctx, l), mustLock(t, ctx, l)
			require.ErrorIs(t, only(lock.Detach(ctx, inner, time.Minute)), lock.ErrInvalid)
			require.NoError(t, inner.Unlock(ctx))
			require.NoError(t, outer.Unlock(ctx))
		}
		harness.Do(t, s.Addr, "SET", k.key("wrong"), "string")
		harness.Do(t, s.Addr, "RPUSH", k.key("list"), "x")
		for _, name := range []string{"wrong", "list"} {
			if err := adopt(t.Context(), name, unknown); k.name == "plain" && name == "wrong" {
				require.ErrorIs(t, err, lock.ErrNotHeld)
			} else {
				require.ErrorContains(t, err, "WRONGTYPE")
			}
		}
		harness.Do(t, s.Addr, "DEL", k.key("wrong"), k.key("list"))
	})
}

// An attempt to adopt whose outcome is unknown is undone, even if its request arrives late, or has an effect that
// nobody learns of in an outage. Then it lasts for no longer than Adopt has asked for.
func TestUndoneAdoption(t *testing.T) {
	const lease = 20 * time.Second // longer than Adopt tries
	eachKind(t, detachable, func(t *testing.T, s *testserver.Server, k kind) {
		for _, outage := range []bool{false, true} {
			if outage && k.name != "lock" { // whose code others share
				continue
			}
			g := harness.NewGate(t, s)
			c, other := harness.ClientAt(t, []string{g.Addr}), harness.Client(t, s)
			id, err := lock.Detach(t.Context(), mustLock(t, t.Context(), k.of(other, "orders")), time.Hour)
			require.NoError(t, err)
			k.prepare(t, s.Addr, "another")
			require.NoError(t, k.of(c, "another").Do(t.Context(), nothing)) // connects
			ctx, cancel := context.WithCancel(t.Context())
			fault := harness.DelayRequest
			if outage {
				fault = harness.Silence
			}
			reached := g.Arm(fault, "EVALSHA", 1)
			failed := async(func() error { return only(k.of(c, "orders").(adopter).Adopt(ctx, id, lock.Lease(lease))) })
			harness.Reached(t, reached)
			if outage {
				g.Stall()
			} else {
				cancel()
			}
			require.ErrorIs(t, ends(t, failed, lease), lock.ErrIndeterminate)
			over := time.Now().Add(lease)
			cancel()
			if outage {
				time.Sleep(time.Second)
				g.Redirect(s)
			}
			require.NoError(t, g.Open())

			owner, _, _ := strings.Cut(id, "#")
			if outage {
				harness.Eventually(t, soon, "it is given back", func() bool { return harness.Do(t, s.Addr, "HEXISTS", "orders", owner) == ":1" })
				most := time.Until(over) + 20*time.Millisecond
				left := time.Duration(harness.PTTL(t, s.Addr, "orders")) * time.Millisecond
				require.LessOrEqual(t, left, most)
			}
			var h lock.Hold
			harness.Eventually(t, soon, "it can be adopted", func() bool {
				h, err = k.of(other, "orders").(adopter).Adopt(t.Context(), id)
				return err == nil
			})
			require.NoError(t, h.Unlock(t.Context()))
			k.unmake(t, s.Addr, "another")
		}
	})
}

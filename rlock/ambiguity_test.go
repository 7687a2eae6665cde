package rlock_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

const ambiguityTimeout = 2 * time.Second // of the watchdog

// ambiguity is one case of TestEveryFateOfEveryRequest.
type ambiguity struct {
	*testing.T
	s     *testserver.Server
	other *redlatch.Client // not behind the gate
	g     *harness.Gate
	l     harness.Lock
	ctx   context.Context
	named bool
	// fenced is set if the holds have tokens, plain if there are no tickets, and an
	// owner holds once.
	fenced, plain bool
	fate          harness.Fate
	file          string // of the script whose request meets the fate
}

// ofKind returns the lock of the case as a client sees it. Nobody polls.
func (a *ambiguity) ofKind(c *redlatch.Client, name string) harness.Lock {
	switch {
	case a.plain:
		return c.PlainLock(name, rlock.WithBackoff(rlock.ConstantBackoff(time.Minute)))
	case a.fenced:
		return c.FencedLock(name)
	default:
		return c.Lock(name)
	}
}

// plainScript is what a plain lock has in the place of a script.
func plainScript(file string) string {
	return "plain_" + strings.Replace(filepath.Base(file), "_named", "", 1)
}

// during runs what sends the request, and opens the gate: after it, or once a
// reply is kept back that it waits for.
func (a *ambiguity) during(operation func()) {
	a.Helper()
	reached := a.g.Arm(a.fate, harness.SHA(a.T, a.file), 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		operation()
	}()
	select {
	case <-reached:
	case <-time.After(10 * time.Second):
		require.FailNow(a, "the request was not sent")
	}
	if a.fate == harness.KeepReply {
		require.NoError(a, a.g.Open())
	}
	<-done
	harness.Eventually(a, 5*time.Second, "no ticket is being removed", func() bool { return harness.GoroutinesIn("(*Lock).forget") == 0 })
	require.NoError(a, a.g.Open())
}

// held checks that the lock has one hold, h's, in the end, and that h is not
// more certain of it than the server.
func (a *ambiguity) held(h lock.Hold) {
	a.Helper()
	harness.Eventually(a, 10*time.Second, "there is one hold", func() bool {
		return harness.HoldCount(a.T, a.l, h.Owner()) == 1 && (a.plain || harness.Do(a, a.s.Addr, "HLEN", a.l.Name()) == ":1")
	})
	require.NoError(a, h.Context().Err())
	ttl := time.Duration(harness.PTTL(a, a.s.Addr, a.l.Name())) * time.Millisecond
	require.LessOrEqual(a, h.Remaining(), ttl+time.Millisecond)
	if a.fenced {
		require.Positive(a, h.Token())
		token, err := testserver.Query(a.s.Addr, "GET", "redisson_lock_token:{"+a.l.Name()+"}")
		require.NoError(a, err)
		require.Equal(a, []string{strconv.FormatInt(h.Token(), 10)}, token)
	}
}

// waiter starts a waiter and returns once it sleeps, after that many attempts.
func (a *ambiguity) waiter(file string, attempts int) <-chan lock.Hold {
	a.Helper()
	reached := a.g.Arm(harness.KeepReply, harness.SHA(a.T, file), attempts)
	next := make(chan lock.Hold, 1)
	go func() {
		h, err := a.l.Lock(a.ctx)
		assert.NoError(a, err)
		next <- h
	}()
	<-reached
	require.NoError(a, a.g.Open())
	harness.Eventually(a, 5*time.Second, "the waiter sleeps", func() bool {
		return harness.GoroutinesIn("(*Waiter).attempt") == 0
	})
	return next
}

// released gives the last hold back.
func (a *ambiguity) released(h lock.Hold) {
	a.Helper()
	require.NotNil(a, h)
	a.held(h)
	require.NoError(a, h.Unlock(a.ctx))
}

func TestEveryFateOfEveryRequest(t *testing.T) {
	operations := []struct {
		name           string
		unnamed, named string // the script; "" where none is sent
		tokens         bool   // the request gives a fenced hold its token
		alone          bool   // not while other cases run: it looks at goroutines
		run            func(a *ambiguity)
	}{
		{"try", "acquire.lua", "acquire_named.lua", true, false, func(a *ambiguity) {
			var h lock.Hold
			var err error
			a.during(func() { h, err = a.l.TryLock(a.ctx) })
			if a.fate.Unknown() {
				require.ErrorIs(a, err, lock.ErrIndeterminate)
				require.NotErrorIs(a, err, lock.ErrNotAcquired)
				return
			}
			require.NoError(a, err)
			a.released(h)
		}},
		{"wait", "acquire.lua", "acquire_named.lua", true, true, func(a *ambiguity) {
			theirs := mustLock(a.T, a.ofKind(a.other, a.l.Name()))
			next := a.waiter(a.file, 2)
			a.during(func() { require.NoError(a, theirs.Unlock(a.ctx)) })
			a.released(<-next)
		}},
		{"hand-off", "hand_off.lua", "", true, true, func(a *ambiguity) {
			h := mustLock(a.T, a.l)
			first := "acquire.lua"
			if a.plain {
				first = plainScript(first)
			}
			next := a.waiter(first, 1)
			_ = h.Owner() // who is known is not passed on without the server
			var err error
			a.during(func() { err = h.Unlock(a.ctx) })
			require.NoError(a, err)
			a.released(<-next)
		}},
		{"release", "release.lua", "release_named.lua", false, false, func(a *ambiguity) {
			h, err := a.l.Lock(a.ctx)
			require.NoError(a, err)
			var again lock.Hold
			if a.named && !a.plain {
				again, err = a.l.Lock(a.ctx)
				require.NoError(a, err)
			}
			a.during(func() { err = h.Unlock(a.ctx) })
			if a.fate == harness.Resend && (!a.named || a.plain) {
				// All that the client hears is that its owner does not hold the lock.
				require.ErrorIs(a, err, lock.ErrLost)
			} else {
				require.NoError(a, err)
			}
			if again != nil {
				a.released(again)
			}
		}},
		{"renewal", "../internal/locking/renew.lua", "../internal/locking/renew.lua", false, false, func(a *ambiguity) {
			h, err := a.l.Lock(a.ctx)
			require.NoError(a, err)
			first := time.Now().Add(h.Remaining())
			a.during(func() {
				harness.Eventually(a, ambiguityTimeout, "the lease is renewed", func() bool {
					return time.Now().Add(h.Remaining()).After(first.Add(ambiguityTimeout / 4))
				})
			})
			a.released(h)
		}},
		{"extension", "../internal/locking/extend.lua", "../internal/locking/extend.lua", false, false, func(a *ambiguity) {
			h, err := a.l.Lock(a.ctx, lock.Lease(30*time.Second))
			require.NoError(a, err)
			a.during(func() { err = h.Extend(a.ctx, time.Minute) })
			if a.fate.Unknown() {
				require.Error(a, err)
				require.NotErrorIs(a, err, lock.ErrLost)
				require.NotErrorIs(a, err, lock.ErrNotHeld)
				a.held(h)
				require.NoError(a, h.Extend(a.ctx, time.Minute))
			} else {
				require.NoError(a, err)
			}
			require.Greater(a, h.Remaining(), 40*time.Second)
			a.released(h)
		}},
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		other := harness.Client(t, s)
		for _, op := range operations {
			t.Run(op.name, func(parent *testing.T) {
				for _, fate := range harness.Fates {
					for _, kind := range []struct {
						name                 string
						named, fenced, plain bool
						file                 string
					}{
						{"unnamed", false, false, false, op.unnamed},
						{"named", true, false, false, op.named},
						{"fenced", false, true, false, op.unnamed},
						{"fenced, named", true, true, false, op.named},
						{"plain", false, false, true, op.unnamed},
						{"plain, named", true, false, true, op.named},
					} {
						if kind.plain && kind.file != "" {
							kind.file = plainScript(kind.file)
						}
						if kind.file == "" || kind.fenced && !op.tokens || kind.fenced && kind.named && op.alone {
							continue // the last for the sake of time
						}
						name := fmt.Sprintf("%s, %v, %s", op.name, fate, kind.name)
						// Both live until all is done: nothing should be renewed then.
						g := harness.NewGate(t, s)
						c, err := redlatch.New(t.Context(), rueidis.ClientOption{
							// A server that is silent is noticed soon.
							InitAddress: []string{g.Addr}, ConnWriteTimeout: time.Second, Dialer: net.Dialer{KeepAlive: 200 * time.Millisecond},
						}, redlatch.WithWatchdogTimeout(ambiguityTimeout))
						require.NoError(t, err)
						t.Cleanup(c.Close)
						parent.Run(name, func(t *testing.T) {
							if !op.alone {
								t.Parallel()
							}
							a := &ambiguity{
								T: t, s: s, other: other, g: g, ctx: context.Background(),
								named: kind.named, fenced: kind.fenced, plain: kind.plain, fate: fate, file: kind.file,
							}
							a.l = a.ofKind(c, name)
							if kind.named {
								a.ctx = lock.WithOwner(a.ctx, c.NewOwner())
							}
							op.run(a)
							// Whatever is still there is given back well before its lease is over.
							harness.Eventually(t, 10*time.Second, "the lock is free", func() bool { return !harness.IsLocked(t, other.Lock(name)) })
							require.NoError(t, a.ofKind(other, name).Do(t.Context(), nothing))
						})
					}
				}
			})
		}
		harness.Eventually(t, 20*time.Second, "nothing is under way", func() bool { return harness.GoroutinesIn("(*Lock).settle") == 0 })
		conn := harness.Conn(t, s.Addr)
		keys, err := conn.Do(t.Context(), conn.B().Keys().Pattern("*").Build()).AsStrSlice()
		require.NoError(t, err)
		for _, key := range keys { // tickets of releases that were not all answered
			if strings.HasPrefix(key, "redisson_lock_token:") {
				continue // counts on for the next holds
			}
			require.Contains(t, key, "redisson_unlock_latch:")
			require.NotEqual(t, int64(-1), harness.PTTL(t, s.Addr, key), "%s does not expire", key)
		}
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		<-time.After(ambiguityTimeout) // some renewal periods
		require.Zero(t, harness.Commands(t, conn)["evalsha"], "something is renewed")
	})
}

// An attempt was answered: somebody else has the lock. A copy of it that arrives
// later takes the lock for a waiter that does not know. When the waiter tries
// again it must not be more certain of its lease than the server, nor believe
// that it has the lock when that was lost in between.
func TestACopyOfAnAttemptArrivesLate(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		for _, m := range []struct{ lost, plain bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
			lost, channel := m.lost, "redisson_lock__channel:{orders}"
			of := func(c *redlatch.Client) harness.Lock { return c.Lock("orders") }
			if m.plain {
				channel = "redlatch_plain__channel:{orders}"
				of = func(c *redlatch.Client) harness.Lock { return plainQuiet(c, "orders") }
			}
			harness.WarmUp(t, s.Addr)
			c, g := harness.GatedClient(t, s)
			other := harness.Client(t, s)
			first := mustLock(t, of(other))
			reached := g.Arm(harness.Echo, "EVALSHA", 2)
			next := make(chan lock.Hold, 1)
			go func() {
				h, err := of(c).Lock(owner(c))
				assert.NoError(t, err)
				next <- h
			}()
			<-reached
			asleep := func() {
				harness.Eventually(t, 5*time.Second, "the waiter sleeps", func() bool { return harness.GoroutinesIn("(*Waiter).attempt") == 0 })
			}
			asleep()
			harness.Do(t, s.Addr, "DEL", "orders")
			require.NoError(t, g.Open())
			require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "orders"))
			wake := func() { harness.Do(t, s.Addr, "PUBLISH", channel, "0") }
			if lost {
				harness.Do(t, s.Addr, "DEL", "orders")
				second := mustLock(t, of(other))
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				wake()
				<-reached
				require.NoError(t, g.Open())
				asleep()
				require.Empty(t, next)
				require.NoError(t, second.Unlock(t.Context())) // and wakes it
			} else {
				lease := redlatch.DefaultWatchdogTimeout.Milliseconds()
				harness.Eventually(t, 5*time.Second, "time passes", func() bool { return harness.PTTL(t, s.Addr, "orders") < lease-200 })
				wake()
			}
			h := <-next
			require.NotNil(t, h)
			ttl := time.Duration(harness.PTTL(t, s.Addr, "orders")) * time.Millisecond
			require.LessOrEqual(t, h.Remaining(), ttl+time.Millisecond)
			require.Equal(t, 1, harness.HoldCount(t, of(other), h.Owner()))
			require.NoError(t, h.Unlock(t.Context()))
			require.ErrorIs(t, first.Unlock(t.Context()), lock.ErrLost)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

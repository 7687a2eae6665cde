package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// TestCancelledAnywhereLeavesNothing cancels an acquisition at every point where
// it waits for something.
func TestCancelledAnywhereLeavesNothing(t *testing.T) {
	const soon = 2 * time.Second // well under any timeout of the connection
	points := []struct {
		name string
		held bool // by another client
		here bool // by the same client
		// at brings the acquisition, which is started by start, to its point.
		at            func(t *testing.T, s *testserver.Server, g *harness.Gate, start func(), h lock.Hold)
		indeterminate bool // whether a request of it is under way
	}{
		{
			name: "first attempt, which succeeds", indeterminate: true,
			at: func(_ *testing.T, _ *testserver.Server, g *harness.Gate, start func(), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				start()
				<-reached
			},
		},
		{
			name: "first attempt, which fails", held: true, indeterminate: true,
			at: func(_ *testing.T, _ *testserver.Server, g *harness.Gate, start func(), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				start()
				<-reached
			},
		},
		{
			name: "subscription", held: true,
			at: func(_ *testing.T, _ *testserver.Server, g *harness.Gate, start func(), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "\r\nSUBSCRIBE", 1)
				start()
				<-reached
			},
		},
		{
			name: "second attempt, after the subscription", held: true, indeterminate: true,
			at: func(_ *testing.T, _ *testserver.Server, g *harness.Gate, start func(), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "EVALSHA", 2)
				start()
				<-reached
			},
		},
		{
			name: "wait for a message", held: true,
			at: func(t *testing.T, s *testserver.Server, _ *harness.Gate, start func(), _ lock.Hold) {
				start()
				quiet(t, s, 1, 2)
			},
		},
		{
			name: "attempt after a message, which succeeds", held: true, indeterminate: true,
			at: func(t *testing.T, s *testserver.Server, g *harness.Gate, start func(), h lock.Hold) {
				start()
				quiet(t, s, 1, 2)
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				require.NoError(t, h.Unlock(t.Context()))
				<-reached
			},
		},
		{
			name: "wait behind a holder of the same process", here: true,
			at: func(t *testing.T, s *testserver.Server, _ *harness.Gate, start func(), _ lock.Hold) {
				start()
				quiet(t, s, 1, 2)
			},
		},
		{
			name: "hand-off, or the release in its place", here: true,
			at: func(t *testing.T, s *testserver.Server, g *harness.Gate, start func(), h lock.Hold) {
				start()
				quiet(t, s, 1, 2)
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				go func() { _ = h.Unlock(context.Background()) }()
				<-reached
			},
		},
	}
	gone := errors.New("gone")
	for _, p := range points {
		t.Run(p.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, pair := range []struct {
					name        string
					held, waits sideOf
				}{
					{"read behind write", writing, reading},
					{"write behind write", writing, writing},
					{"write behind read", reading, writing},
				} {
					for _, name := range []string{"unnamed", "named", "bounded", "named, bounded"} {
						t.Run(pair.name+", "+name, func(t *testing.T) {
							harness.Do(t, s.Addr, "FLUSHALL")
							c, g := harness.GatedClient(t, s)
							harness.WarmUp(t, s.Addr)
							holder := harness.Client(t, s)
							if p.here {
								holder = c
							}
							var h lock.Hold
							if p.held || p.here {
								h = mustLock(t, pair.held(holder, "orders"))
							}
							ctx, cancel := context.WithCancelCause(t.Context())
							defer cancel(nil)
							if strings.HasPrefix(name, "named") {
								ctx = lock.WithOwner(ctx, c.NewOwner())
							}
							var opts []lock.Option
							if strings.HasSuffix(name, "bounded") {
								opts = append(opts, lock.Wait(time.Minute))
							}
							result := make(chan error, 1)
							p.at(t, s, g, func() {
								harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
								go func() {
									_, err := pair.waits(c, "orders").Lock(ctx, opts...)
									result <- err
								}()
							}, h)
							cancel(gone)
							select {
							case err := <-result:
								assert.ErrorIs(t, err, gone)
								assert.ErrorIs(t, err, lock.ErrNotAcquired)
								assert.Equal(t, p.indeterminate, errors.Is(err, lock.ErrIndeterminate), "%v", err)
							case <-time.After(soon):
								require.Fail(t, "the call did not return")
							}
							require.NoError(t, g.Open())
							if h != nil {
								_ = h.Unlock(context.WithoutCancel(t.Context()))
							}
							harness.NothingLeft(t, s.Addr)
							harness.Eventually(t, soon, "nobody listens", func() bool { return c.PubSub().Listeners == 0 })
							// And the lock works as if nothing had been.
							for _, side := range sides {
								require.NoError(t, side.of(c, "orders").Do(t.Context(), nothing))
							}
							holder.Close()
							c.Close()
						})
					}
				}
			})
		})
	}
}

const ambiguityTimeout = 4 * time.Second // of the watchdog

// ambiguity is one case of TestEveryFateOfEveryRequest.
type ambiguity struct {
	*testing.T
	s           *testserver.Server
	c, other    *redlatch.Client // behind the gate, and not
	g           *harness.Gate
	name        string       // of the lock
	read, write harness.Lock // of c
	ctx         context.Context
	fate        harness.Fate
	file        string // of the script whose request meets the fate
	named       bool
	asleep      *int // how many wait in all cases
	cancel      context.CancelFunc

	holds []lock.Hold        // what was there before, the latest last
	next  []<-chan lock.Hold // for those who wait
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
	if a.named {
		harness.Eventually(a, 10*time.Second, "no ticket is being removed", func() bool {
			<-time.After(20 * time.Millisecond) // looking is dear
			return harness.GoroutinesIn("(*Lock).forget") == 0
		})
	}
	require.NoError(a, a.g.Open())
}

func (a *ambiguity) lock(l lock.Locker, opts ...lock.Option) {
	a.Helper()
	a.holds = append(a.holds, mustLockAs(a.T, a.ctx, l, opts...))
}

// theirs is a hold of another client.
func (a *ambiguity) theirs(of sideOf) {
	a.Helper()
	a.holds = append(a.holds, mustLock(a.T, of(a.other, a.name)))
}

// last returns the hold taken last.
func (a *ambiguity) last() lock.Hold { return a.holds[len(a.holds)-1] }

// acquireFile is the script that takes a side of the lock.
func (a *ambiguity) acquireFile(l harness.Lock) string {
	switch {
	case l == a.write:
		return "acquire_write.lua"
	case a.named:
		return "acquire_read_named.lua"
	default:
		return "acquire_read.lua"
	}
}

// wait starts waiters and returns once they sleep, after two attempts of the first.
func (a *ambiguity) wait(l harness.Lock, waiters int) {
	a.Helper()
	reached := a.g.Arm(harness.KeepReply, harness.SHA(a.T, a.acquireFile(l)), 2)
	for i := range waiters {
		next := make(chan lock.Hold, 1)
		go func() {
			h, err := l.Lock(a.ctx)
			if a.ctx.Err() == nil {
				assert.NoError(a, err)
			}
			next <- h
		}()
		a.next = append(a.next, next)
		if i == 0 {
			select {
			case <-reached:
			case <-time.After(10 * time.Second):
				require.FailNow(a, "there was no second attempt")
			}
			require.NoError(a, a.g.Open())
		}
	}
	*a.asleep += waiters
	harness.Eventually(a, 5*time.Second, "all sleep", func() bool {
		return harness.GoroutinesIn("(*Waiter).wait") == *a.asleep && harness.GoroutinesIn("(*Waiter).attempt") == 0
	})
}

// held checks that the lock has the holds of one side, and no others, in the end,
// and that none is more certain of its lease than the server.
func (a *ambiguity) held(l harness.Lock, holds ...lock.Hold) {
	a.Helper()
	seen := reading(a.other, a.name)
	if l == a.write {
		seen = writing(a.other, a.name)
	}
	harness.Eventually(a, 10*time.Second, "these holds are there, once", func() bool {
		for _, h := range holds {
			if harness.HoldCount(a.T, seen, h.Owner()) != 1 {
				return false
			}
		}
		return harness.Do(a, a.s.Addr, "HLEN", a.name) == ":"+strconv.Itoa(1+len(holds))
	})
	for _, h := range holds {
		require.NoError(a, h.Context().Err())
		keys := []string{a.name}
		if l == a.read {
			keys = append(keys, "{"+a.name+"}:"+h.Owner().String()+":rwlock_timeout:1")
		}
		for _, key := range keys {
			ttl := time.Duration(harness.PTTL(a, a.s.Addr, key)) * time.Millisecond
			require.LessOrEqual(a, h.Remaining(), ttl+time.Millisecond, key)
		}
	}
}

// released gives the last holds back.
func (a *ambiguity) released(l harness.Lock, holds ...lock.Hold) {
	a.Helper()
	for _, h := range holds {
		require.NotNil(a, h)
	}
	a.held(l, holds...)
	for _, h := range holds {
		require.NoError(a, h.Unlock(a.ctx))
	}
}

// entered returns what the waiters have got.
func (a *ambiguity) entered() (holds []lock.Hold) {
	a.Helper()
	for _, next := range a.next {
		select {
		case h := <-next:
			require.NotNil(a, h)
			holds = append(holds, h)
		case <-time.After(10 * time.Second):
			require.FailNow(a, "a waiter does not get in")
		}
	}
	return holds
}

// operation is what sends a request. of is the side it is about.
type operation struct {
	name           string
	unnamed, named string // the script; "" where none is sent
	prepare        func(a *ambiguity)
	run            func(a *ambiguity)
}

func try(of func(a *ambiguity) harness.Lock) func(a *ambiguity) {
	return func(a *ambiguity) {
		var h lock.Hold
		var err error
		a.during(func() { h, err = of(a).TryLock(a.ctx) })
		if a.fate.Unknown() {
			require.ErrorIs(a, err, lock.ErrIndeterminate)
			require.NotErrorIs(a, err, lock.ErrNotAcquired)
			return
		}
		require.NoError(a, err)
		a.released(of(a), h)
	}
}

// pass is a hold that ends while others of a side wait.
func pass(of func(a *ambiguity) harness.Lock) func(a *ambiguity) {
	return func(a *ambiguity) {
		var err error
		a.during(func() { err = a.last().Unlock(a.ctx) })
		require.NoError(a, err)
		a.released(of(a), a.entered()...)
	}
}

func release(of func(a *ambiguity) harness.Lock) func(a *ambiguity) {
	return func(a *ambiguity) {
		var err error
		a.during(func() { err = a.last().Unlock(a.ctx) })
		if a.fate == harness.Resend && !a.named {
			// All that the client hears is that its owner does not hold the lock.
			require.ErrorIs(a, err, lock.ErrLost)
		} else {
			require.NoError(a, err)
		}
		if a.named {
			a.released(of(a), a.holds[0])
		}
	}
}

func renewal(of func(a *ambiguity) harness.Lock) func(a *ambiguity) {
	return func(a *ambiguity) {
		h := mustLockAs(a.T, a.ctx, of(a))
		first := time.Now().Add(h.Remaining())
		a.during(func() {
			harness.Eventually(a, ambiguityTimeout, "the lease is renewed", func() bool {
				return time.Now().Add(h.Remaining()).After(first.Add(ambiguityTimeout / 4))
			})
		})
		a.released(of(a), h)
	}
}

func extension(of func(a *ambiguity) harness.Lock) func(a *ambiguity) {
	return func(a *ambiguity) {
		h := a.last()
		var err error
		a.during(func() { err = h.Extend(a.ctx, time.Minute) })
		if a.fate.Unknown() {
			require.Error(a, err)
			require.NotErrorIs(a, err, lock.ErrLost)
			require.NotErrorIs(a, err, lock.ErrNotHeld)
			a.held(of(a), h)
			require.NoError(a, h.Extend(a.ctx, time.Minute))
		} else {
			require.NoError(a, err)
		}
		require.Greater(a, h.Remaining(), 40*time.Second)
		a.released(of(a), h)
	}
}

func theRead(a *ambiguity) harness.Lock  { return a.read }
func theWrite(a *ambiguity) harness.Lock { return a.write }

var operations = []operation{
	{"try to read", "acquire_read.lua", "acquire_read_named.lua", nil, try(theRead)},
	{"try to write", "acquire_write.lua", "acquire_write.lua", nil, try(theWrite)},
	{"wait to read", "acquire_read.lua", "acquire_read_named.lua", func(a *ambiguity) {
		a.theirs(writing)
		a.wait(a.read, 1)
	}, pass(theRead)},
	{"wait to write", "acquire_write.lua", "acquire_write.lua", func(a *ambiguity) {
		a.theirs(reading)
		a.wait(a.write, 1)
	}, pass(theWrite)},
	{"wait to read together", "acquire_read.lua", "", func(a *ambiguity) {
		a.theirs(writing)
		a.wait(a.read, 3)
	}, pass(theRead)},
	{"hand-off from writer to readers", "hand_off.lua", "", func(a *ambiguity) {
		a.lock(a.write)
		a.wait(a.read, 3)
	}, pass(theRead)},
	{"hand-off from writer to writer", "hand_off.lua", "", func(a *ambiguity) {
		a.lock(a.write)
		a.wait(a.write, 1)
	}, pass(theWrite)},
	{"hand-off from reader to writer", "hand_off.lua", "", func(a *ambiguity) {
		a.lock(a.read)
		a.wait(a.write, 1)
	}, pass(theWrite)},
	{"hand-off from one of several readers", "hand_off.lua", "", func(a *ambiguity) {
		a.theirs(reading)
		a.lock(a.read)
		a.wait(a.write, 1)
	}, func(a *ambiguity) {
		var err error
		a.during(func() { err = a.last().Unlock(a.ctx) })
		if a.fate == harness.Resend {
			require.ErrorIs(a, err, lock.ErrLost) // as after a release that is sent again
		} else {
			require.NoError(a, err)
		}
		require.NoError(a, a.holds[0].Context().Err())
		require.Empty(a, a.next[0])
		require.NoError(a, a.holds[0].Unlock(a.ctx))
		a.released(a.write, a.entered()...)
	}},
	{"release of a read hold", "release_read.lua", "release_read.lua", func(a *ambiguity) {
		a.lock(a.read)
		if a.named {
			a.lock(a.read)
		}
	}, release(theRead)},
	{"release of a write hold", "release_write.lua", "release_write.lua", func(a *ambiguity) {
		a.lock(a.write)
		if a.named {
			a.lock(a.write)
		}
	}, release(theWrite)},
	{"downgrade", "", "release_write.lua", func(a *ambiguity) {
		a.lock(a.write)
		a.lock(a.read)
	}, func(a *ambiguity) {
		r := a.last()
		var err error
		a.during(func() { err = a.holds[0].Unlock(a.ctx) })
		require.NoError(a, err)
		a.held(a.read, r)
		beside := mustLock(a.T, reading(a.other, a.name), lock.Wait(2*time.Second))
		require.NoError(a, beside.Unlock(a.ctx))
		a.released(a.read, r)
	}},
	{"renewal of a read hold", "renew_read.lua", "renew_read.lua", nil, renewal(theRead)},
	{"renewal of a write hold", "../internal/locking/renew.lua", "../internal/locking/renew.lua", nil, renewal(theWrite)},
	{"extension of a read hold", "extend.lua", "extend.lua", func(a *ambiguity) { a.lock(a.read, lock.Lease(30*time.Second)) }, extension(theRead)},
	{"extension of a write hold", "extend.lua", "extend.lua", func(a *ambiguity) { a.lock(a.write, lock.Lease(30*time.Second)) }, extension(theWrite)},
	{"a writer leaves", "leave.lua", "leave.lua", func(a *ambiguity) {
		a.theirs(reading)
		a.ctx, a.cancel = context.WithCancel(a.ctx)
		a.wait(a.write, 1)
	}, func(a *ambiguity) {
		a.during(a.cancel)
		require.Nil(a, <-a.next[0])
		// Well before the sign of one that died would go.
		h := mustLock(a.T, reading(a.other, a.name), lock.Wait(3*time.Second))
		require.False(a, exists(a.T, a.s, "redlatch_rwlock_writer:{"+a.name+"}"))
		require.NoError(a, h.Unlock(context.Background()))
		require.NoError(a, a.holds[0].Unlock(context.Background()))
	}},
}

// Everything happens to every request, of owners made for it and of named ones.
func TestEveryFateOfEveryRequest(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		other := harness.Client(t, s)
		for _, op := range operations {
			t.Run(op.name, func(parent *testing.T) {
				var cases []*ambiguity
				asleep := 0
				for _, fate := range harness.Fates {
					for _, named := range []bool{false, true} {
						file := op.unnamed
						if named {
							file = op.named
						}
						if file == "" {
							continue
						}
						name := fmt.Sprintf("%s, %v, named %v", op.name, fate, named)
						g := harness.NewGate(parent, s)
						opt := rueidis.ClientOption{InitAddress: []string{g.Addr}}
						if fate == harness.Silence { // which is to be noticed soon
							opt.ConnWriteTimeout, opt.Dialer = time.Second, net.Dialer{KeepAlive: 200 * time.Millisecond}
						}
						c, err := redlatch.New(parent.Context(), opt, redlatch.WithWatchdogTimeout(ambiguityTimeout))
						require.NoError(parent, err)
						parent.Cleanup(c.Close)
						a := &ambiguity{
							s: s, c: c, other: other, g: g, name: name, ctx: context.Background(),
							read: reading(c, name), write: writing(c, name), fate: fate, file: file, named: named, asleep: &asleep,
						}
						if named {
							a.ctx = lock.WithOwner(a.ctx, c.NewOwner())
						}
						cases = append(cases, a)
					}
				}
				// All prepare, one after the other, and then they run together.
				var preparing sync.Mutex
				var prepared, done sync.WaitGroup
				prepared.Add(len(cases))
				for _, a := range cases {
					done.Go(func() {
						parent.Run(a.name, func(t *testing.T) {
							a.T = t
							func() {
								defer prepared.Done()
								preparing.Lock()
								defer preparing.Unlock()
								if op.prepare != nil {
									op.prepare(a)
								}
							}()
							prepared.Wait()
							op.run(a)
							// Whatever is still there is given back well before its lease is over.
							harness.Eventually(t, 10*time.Second, "the lock is free", func() bool {
								return !harness.IsLocked(t, reading(other, a.name)) && !harness.IsLocked(t, writing(other, a.name))
							})
							require.NoError(t, writing(other, a.name).Do(t.Context(), nothing))
						})
					})
				}
				done.Wait()
			})
		}
		harness.NothingStays(t, s.Addr)
	})
}

// The first delivery of an attempt was answered: others have the lock. A copy of it
// that arrives later takes the lock for a waiter that does not know. When the waiter
// tries again it must not be more certain of its lease than the server.
func TestACopyOfAnAttemptArrivesLate(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		for _, name := range []string{"unnamed", "named"} {
			t.Run(name, func(t *testing.T) {
				harness.WarmUp(t, s.Addr)
				c, g := harness.GatedClient(t, s)
				first := mustLock(t, writing(harness.Client(t, s), "orders"))
				ctx := t.Context()
				if name == "named" {
					ctx = named(t, c)
				}
				reached := g.Arm(harness.Echo, "EVALSHA", 2)
				next := make(chan lock.Hold, 1)
				harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
				go func() {
					h, err := of(c, "orders").Lock(ctx)
					assert.NoError(t, err)
					next <- h
				}()
				<-reached
				quiet(t, s, 1, 2)
				harness.Do(t, s.Addr, "DEL", "orders")
				require.NoError(t, g.Open())
				require.Equal(t, ":2", harness.Do(t, s.Addr, "HLEN", "orders"))
				lease := redlatch.DefaultWatchdogTimeout.Milliseconds()
				harness.Eventually(t, 5*time.Second, "time passes", func() bool { return harness.PTTL(t, s.Addr, "orders") < lease-200 })
				harness.Do(t, s.Addr, "PUBLISH", "redisson_rwlock:{orders}", "1")
				h := <-next
				require.NotNil(t, h)
				ttl := time.Duration(harness.PTTL(t, s.Addr, "orders")) * time.Millisecond
				require.LessOrEqual(t, h.Remaining(), ttl+time.Millisecond)
				require.Equal(t, 1, harness.HoldCount(t, of(c, "orders"), h.Owner()))
				unlock(t, h)
				require.ErrorIs(t, first.Unlock(t.Context()), lock.ErrLost)
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

// The release of a named owner arrives when its hold is over and the owner has
// another, which the server cannot tell from the first but by its ticket.
func TestAReleaseThatArrivesAfterItsHoldEndsNoOtherHold(t *testing.T) {
	const lease = 500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, side := range []struct {
			of   sideOf
			file string
		}{{reading, "release_read.lua"}, {writing, "release_write.lua"}} {
			c, g := harness.GatedClient(t, s)
			other := harness.Client(t, s)
			harness.WarmUp(t, s.Addr)
			ctx, l := named(t, c), side.of(c, "orders")
			h := mustLockAs(t, ctx, l, lock.Lease(lease))
			reached := g.Arm(harness.DelayRequest, harness.SHA(t, side.file), 1)
			// What is sent in the place of the delayed request waits for the lease's end.
			harness.Do(t, s.Addr, "CLIENT", "PAUSE", strconv.FormatInt((lease+lease/4).Milliseconds(), 10), "WRITE")
			require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
			<-reached
			require.False(t, exists(t, s, "orders"))

			next := mustLockAs(t, ctx, l)
			require.NoError(t, g.Open())
			require.Equal(t, 1, harness.HoldCount(t, l, next.Owner()))
			require.False(t, tries(t, t.Context(), writing(other, "orders")))
			require.NoError(t, next.Unlock(ctx))
			require.True(t, tries(t, t.Context(), writing(other, "orders")))
			harness.NothingStays(t, s.Addr)
		}
	})
}

func TestUnlockOfALostHoldSparesTheNextHoldOfItsOwner(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c := harness.Client(t, s)
		l, ctx := of(c, "orders"), named(t, c)
		h1 := mustLockAs(t, ctx, l, lock.Lease(100*time.Millisecond))
		<-h1.Context().Done()
		harness.Eventually(t, time.Second, "its lease is over on the server", func() bool { return !harness.IsLocked(t, l) })
		h2 := mustLockAs(t, ctx, l)
		require.ErrorIs(t, h1.Unlock(ctx), lock.ErrLost)
		harness.Eventually(t, 10*time.Second, "no release is under way", func() bool { return harness.GoroutinesIn("(*Lock).release") == 0 })
		require.Equal(t, 1, harness.HoldCount(t, l, h2.Owner()))
		require.False(t, tries(t, t.Context(), writing(c, "orders")))
		unlock(t, h2)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestScriptFlush(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c := harness.Client(t, s)
		for _, ctx := range []context.Context{t.Context(), named(t, c)} {
			for _, next := range sides { // who waits
				harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
				h := mustLockAs(t, ctx, of(c, "orders"))
				harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
				require.NoError(t, h.Extend(t.Context(), time.Minute))
				waiting := newCrowd(t)
				waiting.add(1, next.of(c, "orders"))
				harness.Eventually(t, 5*time.Second, "it listens or has entered", func() bool {
					return c.PubSub().Subscribed == 1 || len(waiting.entered) == 1
				})
				harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
				unlock(t, h)
				waiting.allIn(2 * time.Second)
				harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
				waiting.out()
			}
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// A server is killed and comes back empty while others wait.
func TestWaitersSurviveARestart(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		holder, c := harness.Client(t, s), harness.Client(t, s)
		var holds []lock.Hold
		var all []*crowd
		for _, held := range sides {
			h := mustLock(t, held.of(holder, "held to "+held.name), lock.Lease(time.Hour))
			holds = append(holds, h)
			for _, waits := range sides {
				if held.name == "read" && waits.name == "read" {
					continue
				}
				waiting := newCrowd(t)
				waiting.add(1, waits.of(c, "held to "+held.name))
				all = append(all, waiting)
			}
		}
		harness.Eventually(t, 5*time.Second, "all wait", func() bool {
			return c.PubSub().Subscribed == 2 && harness.GoroutinesIn("(*Waiter).wait") == len(all)
		})
		s.Kill()
		require.NoError(t, s.Restart())
		begin := time.Now()
		for _, waiting := range all { // each leaves, so that the next can enter
			close(waiting.leave)
		}
		for _, waiting := range all {
			waiting.allIn(20*time.Second - time.Since(begin))
			waiting.wg.Wait()
		}
		for _, h := range holds {
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Connections are killed all the time, of every kind. Calls may fail, and say so;
// nobody is inside with a writer, no waiter hangs, and nothing is left.
func TestConnectionsKilledInALoop(t *testing.T) {
	const clients, goroutines, rounds = 4, 4, 30
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var all []*redlatch.Client
		for range clients {
			all = append(all, harness.Client(t, s, redlatch.WithLogger(slog.New(slog.DiscardHandler))))
		}
		stop := make(chan struct{})
		var killer, wg sync.WaitGroup
		killer.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(15 * time.Millisecond):
					_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
					_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
				}
			}
		})
		const writer = 1 << 16
		var inside, reads, writes atomic.Int32
		for _, c := range all {
			for g := range goroutines {
				wg.Go(func() {
					for i := range rounds {
						ctx := ctx
						if g == 0 {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						of, me, count := reading, int32(1), &reads
						if (g+i)%3 == 0 {
							of, me, count = writing, writer, &writes
						}
						h, err := of(c, "orders").Lock(ctx)
						if err != nil {
							assert.NoError(t, ctx.Err(), "a waiter hangs")
							continue
						}
						if now := inside.Add(me); me == writer {
							assert.Equal(t, int32(writer), now)
						} else {
							assert.Less(t, now, int32(writer))
						}
						count.Add(1)
						<-time.After(time.Millisecond)
						inside.Add(-me)
						if err := h.Unlock(ctx); err != nil {
							assert.ErrorIs(t, err, lock.ErrIndeterminate)
						}
					}
				})
			}
		}
		wg.Wait()
		close(stop)
		killer.Wait()
		t.Logf("%d reads and %d writes of %d", reads.Load(), writes.Load(), clients*goroutines*rounds)
		assert.Positive(t, reads.Load())
		assert.Positive(t, writes.Load())
		harness.NothingStays(t, s.Addr)
	})
}

// Subscriptions are confirmed and no message ever arrives: every waiter gets in all
// the same, when the lease it waits for would be over, at its next safety poll, or,
// a writer behind readers, when it renews its sign.
func TestAllMessagesAreLost(t *testing.T) {
	const (
		safetyPoll = 5 * time.Second
		signPause  = 2 * time.Second
		slack      = time.Second
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		holder := harness.Client(t, s)
		c, g := harness.GatedClient(t, s)
		g.Mute()
		short := lock.Lease(time.Second)
		var all sync.WaitGroup
		for _, m := range []struct {
			name        string
			held, waits sideOf
			lease       []lock.Option // of the holder, who keeps it if there is one
			bound       time.Duration
		}{
			{"short, write", writing, writing, []lock.Option{short}, time.Second},
			{"short, readers", writing, reading, []lock.Option{short}, time.Second},
			{"long, write", writing, writing, nil, safetyPoll},
			{"long, readers", writing, reading, nil, safetyPoll},
			{"long, write behind a reader", reading, writing, nil, signPause},
		} {
			h := mustLock(t, m.held(holder, m.name), m.lease...)
			waiting := newCrowd(t)
			waiting.add(1, m.waits(c, m.name))
			if m.name == "long, readers" || m.name == "short, readers" {
				waiting.add(4, m.waits(c, m.name))
			}
			all.Go(func() {
				harness.Eventually(t, 5*time.Second, "they wait", func() bool { return c.PubSub().Listeners > 0 })
				if m.lease == nil {
					<-time.After(500 * time.Millisecond) // all of them, and not in their first attempts
					assert.NoError(t, h.Unlock(context.Background()))
				}
				deadline := time.After(m.bound + slack)
				for range waiting.size {
					select {
					case err := <-waiting.entered:
						assert.NoError(t, err, m.name)
					case <-deadline:
						assert.Fail(t, "not in time", m.name)
					}
				}
				waiting.out()
				_ = h.Unlock(context.Background())
			})
		}
		all.Wait()
		require.Zero(t, c.PubSub().Messages)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAWaiterGetsInWhenTheHolderWasKilled(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		for _, held := range sides {
			p := harness.Spawn(t, "hold", s.Addr, held.name, timeout.String())
			require.Equal(t, "holding", p.Line(30*time.Second))
			l := writing(harness.Client(t, s), "orders")
			_, err := l.Lock(t.Context(), lock.Wait(timeout+timeout/2)) // it is renewed
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			p.Kill()
			begin := time.Now()
			h := mustLock(t, l)
			require.Less(t, time.Since(begin), timeout+time.Second)
			unlock(t, h)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

func TestAHolderStoppedPastItsLeaseHearsOfIt(t *testing.T) {
	const (
		timeout = 800 * time.Millisecond
		// bound is how soon a holder that goes on hears that its lease is over. All
		// it takes is one turn of its scheduler; where the machine has no time for
		// that, another try is as good.
		bound = 100 * time.Millisecond
		tries = 5
	)
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		_, side, _ := strings.Cut(strings.TrimPrefix(t.Name(), "TestAHolderStoppedPastItsLeaseHearsOfIt/"), "/")
		l := writing(harness.Client(t, s), "orders")
		best := time.Duration(math.MaxInt64)
		for try := 0; try < tries && best > bound; try++ {
			p := harness.Spawn(t, "hold", s.Addr, side, timeout.String())
			require.Equal(t, "holding", p.Line(30*time.Second))
			p.Signal(syscall.SIGSTOP)
			h := mustLock(t, l)
			before := harness.PTTL(t, s.Addr, "orders")
			began := time.Now()
			p.Signal(syscall.SIGCONT)
			told, err := strconv.ParseInt(p.Line(5*time.Second), 10, 64)
			require.NoError(t, err)
			heard := time.Unix(0, told).Sub(began)
			require.Positive(t, heard)
			best = min(best, heard)
			require.Contains(t, p.Line(5*time.Second), lock.ErrLost.Error())
			require.Contains(t, p.Line(5*time.Second), lock.ErrLost.Error())
			// Whoever has it now has noticed nothing.
			after, passed := harness.PTTL(t, s.Addr, "orders"), time.Since(began)
			require.LessOrEqual(t, after, before)
			require.GreaterOrEqual(t, after, before-passed.Milliseconds()-2) // both are rounded
			require.Equal(t, hash{"mode": "write", h.Owner().String() + ":write": "1"}, fields(t, s))
			require.NoError(t, h.Context().Err())
			unlock(t, h)
		}
		t.Logf("told %v after it went on", best)
		require.LessOrEqual(t, best, bound)
		harness.NothingLeft(t, s.Addr)
	})
}

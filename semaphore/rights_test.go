package semaphore_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// rightsWait is for longer than it takes to come into line.
const rightsWait = 400 * time.Millisecond

// rightsScene is a semaphore, a client that may do everything, and one that lacks a
// right.
type rightsScene struct {
	testing.TB
	less, admin *taker
	total       int
	expired     bool // whether some that have expired are still in the set
}

func (a *rightsScene) do(words ...string) { harness.Do(a, a.admin.addr, words...) }

// all takes everything for the client with all rights.
func (a *rightsScene) all() {
	require.NoError(a, a.admin.try(a.Context(), a.total))
}

// giveBack has the client that lacks a right give back what the other has.
func (a *rightsScene) giveBack() {
	n, ids := a.admin.held()
	var err error
	if a.less.expirable != nil {
		err = a.less.expirable.Release(a.Context(), ids...)
	} else {
		err = a.less.plain.Release(a.Context(), n)
	}
	if err == nil {
		a.admin.forget()
	}
}

// waitInLine starts a wait of the client that lacks a right, and returns when it is in
// line or has failed.
func (a *rightsScene) waitInLine() <-chan error {
	waiter := a.less.start(a.Context(), 2, lock.Wait(rightsWait))
	ended := make(chan error, 1)
	failed := make(chan struct{})
	go func() {
		err := <-waiter
		close(failed)
		ended <- err
	}()
	harness.Eventually(a, faultSoon, "it is in line, or has failed", func() bool {
		select {
		case <-failed:
			return true
		default:
			return standsInLine(a, a.admin.addr, a.admin.name) == ":1"
		}
	})
	return ended
}

// check compares what the server has with what the clients know.
func (a *rightsScene) check() {
	a.Helper()
	keys, err := testserver.Query(a.admin.addr, "KEYS", "redlatch_sc_*")
	require.NoError(a, err)
	for _, key := range keys {
		require.NotEqual(a, int64(-1), harness.PTTL(a, a.admin.addr, key), "%s does not expire", key)
	}
	if !a.expired {
		requireExact(a, a.total, a.less, a.admin)
		return
	}
	members, err := testserver.Query(a.admin.addr, "ZRANGE", wire.PermitTimeouts(a.admin.name), "0", "-1")
	require.NoError(a, err)
	require.Equal(a, a.total, a.less.free(a)+len(members), "permits, free and taken")
	_, ids := a.less.held()
	for i, m := range members {
		members[i] = hex.EncodeToString([]byte(m))
	}
	require.Subset(a, members, ids)
}

// Whatever right a user lacks, permits neither vanish nor come into being: what fails
// has changed nothing.
func TestALackingRightCostsNoPermits(t *testing.T) {
	const total = 10
	rights := []string{
		"get", "set", "del", "exists", "incrby", "decrby", "pttl", "pexpire", "time", "publish", "subscribe",
		"zadd", "zrem", "zscore", "zrange", "zrangebyscore", "zcard", "zcount",
	}
	ending := func(a *rightsScene) { a.do("PEXPIRE", a.admin.name, "60000") }
	operations := []struct {
		name string
		kind string // "": both
		run  func(a *rightsScene)
	}{
		{"take", "", func(a *rightsScene) { _ = a.less.try(a.Context(), 3) }},
		{"take of a semaphore that ends", "", func(a *rightsScene) {
			ending(a)
			_ = a.less.try(a.Context(), 3)
			_ = a.less.try(a.Context(), 2)
		}},
		{"take past the dead", "", func(a *rightsScene) {
			for _, key := range []string{wire.SemaphoreWaiting(a.less.name), wire.SemaphoreAlive(a.less.name)} {
				a.do("ZADD", key, "1", "somebody")
				a.do("PEXPIRE", key, "60000")
			}
			_ = a.less.try(a.Context(), 3)
		}},
		{"take what has expired", expirableKind, func(a *rightsScene) {
			_, err := a.admin.expirable.AcquireN(a.Context(), total, lock.Lease(time.Millisecond))
			if err != nil {
				require.ErrorIs(a, err, lock.ErrNotAcquired) // a slow machine
			}
			a.expired = true
			harness.Eventually(a, faultSoon, "they have expired", func() bool {
				n, err := a.admin.expirable.Available(a.Context())
				return err == nil && n == total
			})
			for range 3 {
				_ = a.less.try(a.Context(), 3)
			}
		}},
		{"wait in vain", "", func(a *rightsScene) {
			a.all()
			ended := a.waitInLine()
			require.Error(a, await(a, ended))
		}},
		{"wait", "", func(a *rightsScene) {
			a.all()
			ended := a.waitInLine()
			require.NoError(a, a.admin.release(a.Context()))
			_ = await(a, ended)
		}},
		{"release for others of the process", "", func(a *rightsScene) {
			ending(a)
			a.all()
			ended := a.waitInLine()
			a.giveBack()
			_ = await(a, ended)
		}},
		{"release", "", func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 1))
			a.giveBack()
		}},
		{"release of several", "", func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 4))
			a.giveBack()
		}},
		{"calling off", "", func(a *rightsScene) {
			ctx, cancel := context.WithCancel(a.Context())
			a.do("CLIENT", "PAUSE", "30000", "WRITE")
			done := make(chan error, 1)
			go func() { done <- a.less.try(ctx, 3) }()
			harness.Eventually(a, faultSoon, "it is under way", func() bool { return blocked(a, a.admin.addr) })
			cancel()
			require.ErrorIs(a, await(a, done), lock.ErrIndeterminate)
			a.do("CLIENT", "UNPAUSE")
		}},
		{"set", "", func(a *rightsScene) {
			a.do("DEL", a.less.name)
			a.total = 0
			if made, _ := a.less.set(a.Context(), 7); made {
				a.total = 7
			}
		}},
		{"add", "", func(a *rightsScene) {
			for _, n := range []int{5, -3} {
				if err := a.less.add(a.Context(), n); err == nil {
					a.total += n
				}
			}
		}},
		{"drain", plainKind, func(a *rightsScene) {
			n, _ := a.less.plain.Drain(a.Context())
			a.total -= n
		}},
		{"set the sum", expirableKind, func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 4))
			if err := a.less.expirable.SetPermits(a.Context(), 6); err == nil {
				a.total = 6
			}
		}},
		{"look", "", func(a *rightsScene) {
			if a.less.expirable != nil {
				_, _ = a.less.expirable.Permits(a.Context())
			} else {
				_, _ = a.less.plain.Available(a.Context())
			}
		}},
	}
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		admin := harness.Client(t, s, faultQuietly)
		for _, right := range rights {
			harness.Do(t, s.Addr, "ACL", "SETUSER", right, "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{
				InitAddress: []string{s.Addr}, Username: right, Password: "secret",
			}, faultQuietly)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			for _, kind := range faultKinds {
				for _, op := range operations {
					if op.kind != "" && op.kind != kind {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s/%s", right, kind, op.name), func(t *testing.T) {
						a := &rightsScene{TB: t, less: takerOf(c, s, kind, "pool"), admin: takerOf(admin, s, kind, "pool"), total: total}
						harness.Do(t, s.Addr, "FLUSHALL")
						_, err := a.admin.set(t.Context(), total)
						require.NoError(t, err)
						op.run(a)
						settled(t)
						a.check()
						for _, k := range []*taker{a.less, a.admin} {
							k.forget()
						}
					})
				}
			}
		}
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// What tells others is not needed for the rest.
func TestPublishingForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "mute", "on", ">secret", "+@all", "allkeys", "resetchannels")
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{
			InitAddress: []string{s.Addr}, Username: "mute", Password: "secret",
		}, faultQuietly)
		require.NoError(t, err)
		t.Cleanup(c.Close)
		ctx := t.Context()
		for _, kind := range faultKinds {
			k := takerOf(c, s, kind, kind)
			made, err := k.set(ctx, 2)
			require.NoError(t, err)
			require.True(t, made)
			require.NoError(t, k.add(ctx, 2))
			require.NoError(t, k.acquire(ctx, 4))
			waiter := k.start(ctx, 1)
			awaitPlace(t, s.Addr, kind)
			require.NoError(t, k.release(ctx))
			require.NoError(t, await(t, waiter), "released in this process")
			require.NoError(t, k.release(ctx))
			requireExact(t, 4, k)
		}
	})
}

// On a server out of memory nobody takes permits, and who has some can keep them, and
// give them back.
func TestOutOfMemory(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(renewedTimeout), faultQuietly)
		loadScripts(t, s.Addr)
		ctx := t.Context()
		for _, kind := range faultKinds {
			k, other := takerOf(c, s, kind, kind), takerOf(harness.Client(t, s), s, kind, kind)
			_, err := k.set(ctx, 10)
			require.NoError(t, err)
			require.NoError(t, other.try(ctx, 1))
			require.NoError(t, k.try(ctx, 9))
			full := func(limit string) { harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", limit) }
			full("1")
			for _, err := range []error{k.try(ctx, 1), other.try(ctx, 1)} {
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrIndeterminate)
			}
			if k.expirable != nil {
				p := other.permits[0]
				require.NoError(t, p.Extend(ctx, time.Minute))
				taken, err := other.expirable.UpdateLeaseTime(ctx, p.ID(), 20*time.Second)
				require.NoError(t, err)
				require.True(t, taken)
				first := time.Now().Add(k.permits[0].Remaining())
				harness.Eventually(t, 2*renewedTimeout, "the lease is renewed", func() bool {
					return time.Now().Add(k.permits[0].Remaining()).After(first.Add(renewedTimeout / 2))
				})
			}
			full("0")
			waiter := k.start(ctx, 3)
			awaitPlace(t, s.Addr, kind)
			full("1")
			began := time.Now()
			require.NoError(t, other.release(ctx))
			require.NoError(t, k.release(ctx))
			require.Less(t, time.Since(began), faultSlack)
			full("0") // the release may have had no time for a waiter
			require.NoError(t, await(t, waiter))
			full("1")
			require.NoError(t, k.release(ctx))
			settled(t)
			requireExact(t, 10, k, other)
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		}
	})
}

// A release is refused, and the refusal is lost: who asks again hears of it.
func TestARefusalThatIsLostIsNoSuccess(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		loadScripts(t, s.Addr)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "less", "on", ">secret", "+@all", "allkeys", "allchannels", "-incrby")
		for _, kind := range faultKinds {
			admin := takerOf(harness.Client(t, s), s, kind, kind)
			_, err := admin.set(t.Context(), 2)
			require.NoError(t, err)
			require.NoError(t, admin.try(t.Context(), 2))
			g := harness.NewGate(t, s)
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{
				InitAddress: []string{g.Addr}, Username: "less", Password: "secret",
			}, faultQuietly)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			a := &rightsScene{TB: t, less: takerOf(c, s, kind, kind), admin: admin, total: 2}
			script := "release.lua"
			if kind == expirableKind {
				script = "permit_" + script
			}
			reached := g.Arm(harness.LoseReply, nameOf(t, script), 1)
			a.giveBack()
			<-reached
			n, _ := admin.held()
			require.Equal(t, 2, n, "it was not told that they were given back")
			c.Close() // and gives up trying
			a.check()
		}
	})
}

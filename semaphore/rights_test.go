package semaphore_test

import (
	"context"
	"encoding/hex"
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
	harness.EachOf(t, rights, func(right string) string { return right }, func(t *testing.T, s *testserver.Server, right string) {
		admin := harness.Client(t, s, faultQuietly)
		c := without(t, s, s.Addr, right)
		for _, kind := range faultKinds {
			for _, op := range operations {
				if op.kind != "" && op.kind != kind {
					continue
				}
				t.Run(kind+"/"+op.name, func(t *testing.T) {
					a := &rightsScene{TB: t, less: takerOf(c, s, kind, "pool"), admin: takerOf(admin, s, kind, "pool"), total: total}
					harness.Do(t, s.Addr, "FLUSHALL")
					_, err := a.admin.set(t.Context(), total)
					require.NoError(t, err)
					op.run(a)
					harness.Idle(t, c, admin)
					a.check()
					for _, k := range []*taker{a.less, a.admin} {
						k.forget()
					}
				})
			}
		}
	})
}

// without returns a client at that address whose user may do everything but one thing.
func without(t *testing.T, s *testserver.Server, addr, right string) *redlatch.Client {
	t.Helper()
	harness.Do(t, s.Addr, "ACL", "SETUSER", "less", "reset", "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{addr}, Username: "less", Password: "secret"}, faultQuietly)
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Close()
		harness.Do(t, s.Addr, "ACL", "DELUSER", "less")
	})
	return c
}

// A release is refused, and the refusal is lost: who asks again hears of it.
func TestARefusalThatIsLostIsNoSuccess(t *testing.T) {
	harness.EachOf(t, faultKinds, func(kind string) string { return kind }, func(t *testing.T, s *testserver.Server, kind string) {
		loadScripts(t, s.Addr)
		admin := takerOf(harness.Client(t, s), s, kind, kind)
		_, err := admin.set(t.Context(), 2)
		require.NoError(t, err)
		require.NoError(t, admin.try(t.Context(), 2))
		g := harness.NewGate(t, s)
		c := without(t, s, g.Addr, "incrby")
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
	})
}

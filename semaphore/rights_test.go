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
	"github.com/redlatch/redlatch/semaphore"
)

// rightsWait is long enough to join the wait queue.
const rightsWait = 400 * time.Millisecond

// rightsScene is a semaphore with a client that has all rights and one that lacks a right.
type rightsScene struct {
	testing.TB
	less, admin *taker
	total       int
	expired     bool // expired permits may still be in the set
}

func (a *rightsScene) do(words ...string) { harness.Do(a, a.admin.addr, words...) }

// exists returns 1 if the semaphore exists, and 0 otherwise.
func (a *rightsScene) exists() int {
	if harness.Do(a, a.admin.addr, "EXISTS", a.admin.name) == ":1" {
		return 1
	}
	return 0
}

// acquireAll acquires all permits for the client with all rights.
func (a *rightsScene) acquireAll() {
	require.NoError(a, a.admin.try(a.Context(), a.total))
}

// releaseOther releases the permits of the other client through the one that lacks a right.
func (a *rightsScene) releaseOther() {
	n, ids := a.admin.held()
	var err error
	if a.less.permitSem != nil {
		err = a.less.permitSem.Release(a.Context(), ids...)
	} else {
		err = a.less.plain.Release(a.Context(), n)
	}
	if err == nil {
		a.admin.forget()
	}
}

// startQueued starts to acquire permits through the client that lacks a right, and returns when it
// is in the wait queue or has failed.
func (a *rightsScene) startQueued() <-chan error {
	waiter := a.less.start(a.Context(), 2, lock.Wait(rightsWait))
	ended := make(chan error, 1)
	failed := make(chan struct{})
	go func() {
		err := <-waiter
		close(failed)
		ended <- err
	}()
	harness.Eventually(a, soon, "the client is queued or has failed", func() bool {
		select {
		case <-failed:
			return true
		default:
			return queueLength(a, a.admin.addr, a.admin.name) == ":1"
		}
	})
	return ended
}

// check compares the permits on the server with those of the clients.
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
	require.Equal(a, a.total, a.less.free(a)+len(members), "permits, free and acquired")
	_, ids := a.less.held()
	for i, m := range members {
		members[i] = hex.EncodeToString([]byte(m))
	}
	require.Subset(a, members, ids)
}

// No missing right loses or adds permits: a call that fails has changed nothing.
func TestMissingRightLosesNoPermits(t *testing.T) {
	const total = 10
	rights := []string{
		"get", "set", "del", "exists", "incrby", "decrby", "hget", "hset", "hdel", "pttl", "pexpire", "time", "publish", "subscribe",
		"persist", "zadd", "zrem", "zscore", "zrange", "zrangebyscore", "zcard", "zcount",
	}
	expiring := func(a *rightsScene) { a.do("PEXPIRE", a.admin.name, "60000") }
	type operation struct {
		name  string
		kind  string // "" for both
		run   func(a *rightsScene)
		alone bool // it has requests that may be served alone
	}
	operations := []operation{
		{"acquire", "", func(a *rightsScene) { _ = a.less.try(a.Context(), 3) }, true},
		{"acquire one", "", func(a *rightsScene) { _ = a.less.try(a.Context(), 1) }, true},
		{"acquire from a semaphore that expires", "", func(a *rightsScene) {
			expiring(a)
			_ = a.less.try(a.Context(), 3)
			_ = a.less.try(a.Context(), 2)
		}, false},
		{"acquire past a dead client", "", func(a *rightsScene) {
			for _, key := range []string{wire.SemaphoreWaiting(a.less.name), wire.SemaphoreAlive(a.less.name)} {
				a.do("ZADD", key, "1", "dead")
				a.do("PEXPIRE", key, "60000")
			}
			_ = a.less.try(a.Context(), 3)
		}, true},
		{"acquire expired permits", permitKind, func(a *rightsScene) {
			_, err := a.admin.permitSem.AcquireN(a.Context(), total, lock.Lease(time.Millisecond))
			if err != nil {
				require.ErrorIs(a, err, lock.ErrNotAcquired) // on a slow machine
			}
			a.expired = true
			harness.Eventually(a, soon, "the permits have expired", func() bool {
				n, err := a.admin.permitSem.Available(a.Context())
				return err == nil && n == total
			})
			for range 3 {
				_ = a.less.try(a.Context(), 3)
			}
		}, false},
		{"wait without success", "", func(a *rightsScene) {
			a.acquireAll()
			ended := a.startQueued()
			require.Error(a, await(a, ended))
		}, false},
		{"wait", "", func(a *rightsScene) {
			a.acquireAll()
			ended := a.startQueued()
			require.NoError(a, a.admin.release(a.Context()))
			_ = await(a, ended)
		}, false},
		{"release to local waiters", "", func(a *rightsScene) {
			expiring(a)
			a.acquireAll()
			ended := a.startQueued()
			a.releaseOther()
			_ = await(a, ended)
		}, false},
		{"release", "", func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 1))
			a.releaseOther()
		}, true},
		{"release of several", "", func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 4))
			a.releaseOther()
		}, true},
		{"adopt", permitKind, func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 3))
			expiring(a)
			id, err := a.admin.permits[0].Detach(a.Context(), time.Minute)
			require.NoError(a, err)
			p, err := a.less.permitSem.Adopt(a.Context(), id)
			if err != nil {
				p, err = a.admin.permitSem.Adopt(a.Context(), id)
				require.NoError(a, err)
			}
			a.admin.permits = []*semaphore.Permit{p}
		}, false},
		{"undo", "", func(a *rightsScene) {
			ctx, cancel := context.WithCancel(a.Context())
			a.do("CLIENT", "PAUSE", "30000", "WRITE")
			done := make(chan error, 1)
			go func() { done <- a.less.try(ctx, 3) }()
			harness.Eventually(a, soon, "the request is in progress", func() bool { return blocked(a, a.admin.addr) })
			cancel()
			require.ErrorIs(a, await(a, done), lock.ErrIndeterminate)
			a.do("CLIENT", "UNPAUSE")
		}, false}, // a right that is withdrawn between the acquisition and its undo may lose permits
		{"set", "", func(a *rightsScene) {
			a.do("DEL", a.less.name)
			a.total = 0
			if made, _ := a.less.set(a.Context(), 7); made {
				a.total = 7
			}
		}, false},
		{"add", "", func(a *rightsScene) {
			for _, n := range []int{5, -3} {
				if err := a.less.add(a.Context(), n); err == nil {
					a.total += n
				}
			}
		}, false},
		{"create", "", func(a *rightsScene) {
			a.do("DEL", a.less.name)
			a.less.creates(7)
			_ = a.less.try(a.Context(), 3)
			a.total = 7 * a.exists()
		}, false},
		{"create for permits that are left", permitKind, func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 2))
			a.do("DEL", a.less.name)
			a.less.creates(7)
			_ = a.less.try(a.Context(), 3)
			a.total = max(2, 7*a.exists())
		}, false},
		{"release what creates", "", func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 2))
			a.do("DEL", a.less.name)
			a.less.creates(7)
			a.releaseOther()
			a.total = max(2, 7*a.exists())
		}, false},
		{"delete", "", func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 3))
			if deleted, _ := a.less.delete(a.Context()); deleted {
				a.admin.forget()
				a.total = 0
			}
		}, false},
		{"set the free ones", plainKind, func(a *rightsScene) {
			if err := a.less.plain.SetPermits(a.Context(), 13); err == nil {
				a.total = 13
			}
		}, false},
		{"drain", plainKind, func(a *rightsScene) {
			n, _ := a.less.plain.Drain(a.Context())
			a.total -= n
		}, false},
		{"set the total", permitKind, func(a *rightsScene) {
			require.NoError(a, a.admin.try(a.Context(), 4))
			if err := a.less.permitSem.SetPermits(a.Context(), 6); err == nil {
				a.total = 6
			}
		}, false},
		{"read", "", func(a *rightsScene) {
			if a.less.permitSem != nil {
				_, _ = a.less.permitSem.Stats(a.Context())
			} else {
				_, _ = a.less.plain.Stats(a.Context())
			}
		}, false},
	}
	harness.EachOf(t, rights, func(right string) string { return right }, func(t *testing.T, s *testserver.Server, right string) {
		admin := harness.Client(t, s, quiet)
		c := without(t, s, s.Addr, right)
		for _, kind := range takerKinds {
			for n, op := range append(operations, operations...) {
				warm := n >= len(operations) // the client sends the scripts for the usual case first
				if op.kind != "" && op.kind != kind || warm && !op.alone {
					continue
				}
				t.Run(kind+"/"+op.name, func(t *testing.T) {
					a := &rightsScene{TB: t, less: takerOf(c, s, kind, "pool"), admin: takerOf(admin, s, kind, "pool"), total: total}
					harness.Do(t, s.Addr, "FLUSHALL")
					_, err := a.admin.set(t.Context(), total)
					require.NoError(t, err)
					if warm {
						harness.Do(t, s.Addr, "ACL", "SETUSER", "less", "+"+right)
						for range 2 {
							require.NoError(t, a.less.try(t.Context(), 1))
							require.NoError(t, a.less.release(t.Context()))
						}
						harness.Do(t, s.Addr, "ACL", "SETUSER", "less", "-"+right)
					}
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

// without returns a client at that address whose user lacks one right.
func without(t *testing.T, s *testserver.Server, addr, right string) *redlatch.Client {
	t.Helper()
	harness.Do(t, s.Addr, "ACL", "SETUSER", "less", "reset", "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{addr}, Username: "less", Password: "secret"}, quiet)
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Close()
		harness.Do(t, s.Addr, "ACL", "DELUSER", "less")
	})
	return c
}

// A release is refused and the reply is lost. The retry is refused as well.
func TestLostRefusalIsNotSuccess(t *testing.T) {
	harness.EachOf(t, takerKinds, func(kind string) string { return kind }, func(t *testing.T, s *testserver.Server, kind string) {
		loadScripts(t, s.Addr)
		admin := takerOf(harness.Client(t, s), s, kind, kind)
		_, err := admin.set(t.Context(), 2)
		require.NoError(t, err)
		require.NoError(t, admin.try(t.Context(), 2))
		g := harness.NewGate(t, s)
		c := without(t, s, g.Addr, "incrby")
		a := &rightsScene{TB: t, less: takerOf(c, s, kind, kind), admin: admin, total: 2}
		script := "release.lua"
		if kind == permitKind {
			script = "permit_" + script
		}
		reached := g.Arm(harness.LoseReply, sha(t, script), 1)
		a.releaseOther()
		<-reached
		n, _ := admin.held()
		require.Equal(t, 2, n, "the release has failed")
		c.Close() // ends the retries
		a.check()
	})
}

package contract_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// calls are all methods of an object, called with a context. The owner is who else may
// have it.
func (k kind) calls(l lock.Locker, ctx context.Context, o lock.Owner) map[string]func() error {
	owner := ctx
	if owner != nil {
		owner = lock.WithOwner(owner, o)
	}
	calls := map[string]func() error{
		"Lock":    func() error { return only(l.Lock(ctx)) },
		"TryLock": func() error { return only(l.TryLock(ctx)) },
		"Do":      func() error { return l.Do(ctx, nothing) },
	}
	if k.owned {
		l := l.(harness.Lock)
		calls["Lock, named"] = func() error { return only(l.Lock(owner)) }
		calls["Unlock"] = func() error { return l.UnlockOwner(owner) }
		calls["ForceUnlock"] = func() error { return only(l.ForceUnlock(ctx)) }
		for name, look := range looks(l, o) {
			calls[name] = func() error { return look(ctx) }
		}
	}
	return calls
}

func TestBadInputIsAnErrorOfTheCall(t *testing.T) {
	eachKind(t, andInMemory(leased), func(t *testing.T, s *testserver.Server, k kind) {
		c, gone := harness.Client(t, s), harness.Client(t, s)
		gone.Close()
		keys := harness.Do(t, s.Addr, "DBSIZE")
		var none context.Context
		for name, bad := range map[string]struct {
			l    lock.Locker
			ctx  context.Context
			want error
		}{
			"no name":       {k.of(c, ""), t.Context(), lock.ErrInvalid},
			"no context":    {k.of(c, "orders"), none, lock.ErrInvalid},
			"closed client": {k.of(gone, "orders"), t.Context(), lock.ErrClosed},
		} {
			if k.memory && bad.want == lock.ErrClosed {
				continue
			}
			for what, call := range k.calls(bad.l, bad.ctx, c.NewOwner()) {
				require.ErrorIs(t, call(), bad.want, "%s: %s", name, what)
			}
		}

		l := k.of(c, "orders")
		for _, opts := range [][]lock.Option{
			{lock.Lease(0)}, {lock.Lease(-time.Second)}, {lock.Lease(time.Microsecond)}, {lock.Lease(lock.MaxLease + 1)}, {lock.Lease(math.MaxInt64)},
			{lock.Wait(-1)}, {lock.MaxHold(0)}, {lock.MaxHold(-1)}, {nil},
			{lock.Lease(time.Second), lock.MaxHold(time.Second)},
		} {
			require.ErrorIs(t, only(l.Lock(t.Context(), opts...)), lock.ErrInvalid, "%v", opts)
		}
		require.ErrorIs(t, l.Do(t.Context(), nil), lock.ErrInvalid)
		if k.owned {
			require.ErrorIs(t, k.lock(c, "orders").UnlockOwner(t.Context()), lock.ErrInvalid, "nobody is named")
			require.ErrorIs(t, only(k.lock(c, "orders").HoldCount(t.Context(), lock.Owner{})), lock.ErrInvalid)
		}
		ended, cancel := context.WithCancelCause(t.Context())
		boom := errors.New("boom")
		cancel(boom)
		err := only(l.Lock(ended))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, boom)
		require.Equal(t, keys, harness.Do(t, s.Addr, "DBSIZE"))
	})
}

func TestOptionsOfObjects(t *testing.T) {
	backoff := rlock.ConstantBackoff(time.Second)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for _, bad := range []struct {
			l    lock.Locker
			says string
		}{
			{c.SpinLock("orders", nil, backoff), "the backoff is nil"},
			{c.PlainLock("orders", nil), "the backoff is nil"},
			{c.Lock("orders", nil), "nil option"},
			{c.FencedLock("orders", nil), "nil option"},
			{c.FairLock("orders", fairlock.NonReentrant(), nil), "nil option"},
			{redlatch.RedLock("orders", []*redlatch.Client{c}, nil), "nil option"},
			{c.MultiLock(c.Lock("orders", nil)), "nil option"},
		} {
			_, owned := bad.l.(harness.Lock)
			for what, call := range (kind{owned: owned}).calls(bad.l, t.Context(), c.NewOwner()) {
				err := call()
				require.ErrorIs(t, err, lock.ErrInvalid, "%s: %s", bad.says, what)
				require.ErrorContains(t, err, `"orders"`)
				require.ErrorContains(t, err, bad.says)
			}
		}
		for _, l := range []lock.Locker{
			c.Lock("a", rlock.NonReentrant()), c.FencedLock("b", rlock.NonReentrant()),
			c.SpinLock("c", backoff), c.PlainLock("d", backoff), c.FairLock("e", fairlock.NonReentrant()),
		} {
			require.NoError(t, l.Do(t.Context(), nothing), "%T", l)
		}
	})
}

// unslotted are names whose helper keys have other cluster slots than the names.
var unslotted = []string{"a{b", "a{}b", "x}y", "}a"}

// Outside a cluster any name is valid, and all keys have the name that the mapper returns.
func TestNamesWithBraces(t *testing.T) {
	mapper := func(name string) string {
		if strings.HasPrefix(name, "orders") {
			return "app:" + name
		}
		return strings.TrimPrefix(name, "nothing")
	}
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		other := harness.Client(t, s)
		c := harness.Client(t, s, redlatch.WithNameMapper(mapper))
		for _, name := range append([]string{"orders", "{orders}", "{shop}orders"}, unslotted...) {
			there := mapper(name)
			harness.Do(t, s.Addr, "FLUSHALL") // counters and cached replies
			k.prepare(t, s.Addr, there)
			h := mustLock(t, t.Context(), k.of(c, name))
			require.NotContains(t, h.Name()+k.of(c, name).Name(), "app:")
			keys, err := testserver.Query(s.Addr, "KEYS", "*")
			require.NoError(t, err)
			require.True(t, strings.Contains(there, "{") || slices.Contains(keys, k.key(there)), "%q", keys)
			for _, key := range keys {
				require.Contains(t, key, there)
			}
			isTaken(t, k.rival(other, there))
			waiter := k.waits(t, k.rival(c, name), c)
			require.NoError(t, h.Unlock(t.Context()))
			getsIn(t, waiter)
			k.unmake(t, s.Addr, there)
		}
		require.ErrorIs(t, only(k.of(c, "nothing").TryLock(t.Context())), lock.ErrInvalid)
		harness.Do(t, s.Addr, "FLUSHALL")
		k.prepare(t, s.Addr, "orders")
	})
}

// A key of another type, or the hash of an application, is an error of every call, and is left as it is.
func TestAKeyOfTheWrongType(t *testing.T) {
	hashes := [][]string{
		{"name", "bob", "visits", "3"}, {"visits", "3"}, {"mode", "read"},
		{"mode", "read", "name", "bob"}, {"mode", "write", "name", "bob"}, {"mode", "read", "visits", "3", "name", "bob"},
	}
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
		defer cancel()
		values := [][]string{{"RPUSH", "orders", "precious"}}
		if k.stored[0] == "HSET" {
			for _, fields := range hashes {
				values = append(values, append([]string{"HSET", "orders"}, fields...))
			}
		} else if k.name != "plain" {
			values = append(values, []string{"SET", "orders", "precious"})
		}
		for _, value := range values {
			says, unlock := "WRONGTYPE", func(context.Context) error { return lock.ErrLost }
			switch value[0] {
			case "RPUSH":
				unlock = mustLock(t, ctx, k.of(c, "orders")).Unlock
			case "SET": // it is no number
				says = "another type"
			}
			harness.Do(t, s.Addr, "DEL", "orders")
			harness.Do(t, s.Addr, value...)
			before := harness.Do(t, s.Addr, "DUMP", "orders")
			err := only(k.of(c, "orders").TryLock(ctx))
			require.ErrorContains(t, err, "another type")
			failure{nil, nil}.check(t, err, "orders")
			if err := unlock(ctx); k.owned {
				require.ErrorIs(t, err, lock.ErrLost)
			} else {
				require.Error(t, err)
			}
			for _, c := range []*redlatch.Client{c, other} {
				for what, call := range k.calls(k.of(c, "orders"), ctx, c.NewOwner()) {
					switch err := call(); what {
					case "IsLocked", "TTL", "HoldCount": // which may ask for less
					case "Unlock":
						require.Error(t, err)
					default:
						require.ErrorContains(t, err, says, "%s %v", what, value)
						require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
						if k.name != "red" { // for which it is not a majority
							require.NotErrorIs(t, err, lock.ErrNotAcquired, what)
						}
					}
				}
			}
			require.Equal(t, before, harness.Do(t, s.Addr, "DUMP", "orders"))
			if value[0] == "HSET" {
				require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"), "nothing else is left")
			}
			harness.Idle(t, c, other)
			harness.Do(t, s.Addr, "FLUSHALL")
			k.prepare(t, s.Addr, "orders")
		}
	})
}

// restricted returns a client whose user may not do everything. The server must know the
// scripts already if these may not be loaded.
func restricted(t *testing.T, s *testserver.Server, opts []redlatch.Option, rules ...string) *redlatch.Client {
	t.Helper()
	harness.Do(t, s.Addr, append([]string{"ACL", "SETUSER", "less", "reset", "on", ">secret", "+@all", "allkeys", "allchannels"}, rules...)...)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{
		InitAddress: []string{s.Addr}, Username: "less", Password: "secret",
	}, append(opts, quiet)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Close()
		harness.Do(t, s.Addr, "ACL", "DELUSER", "less")
	})
	return c
}

// What tells others is not needed for the rest: those of this process are told, and others
// look themselves.
func TestPublishingForbidden(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		for rule, hears := range map[string]bool{"resetchannels": false, "-publish": true} {
			c := restricted(t, s, nil, rule)
			for _, ctx := range k.owners(t, c) {
				require.NoError(t, k.of(c, "orders").Do(ctx, nothing))
				h := mustLock(t, ctx, k.of(c, "orders"))
				w := async(func() error { return k.rival(c, "orders").Do(context.Background(), nothing) })
				if hears {
					harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
				}
				require.NoError(t, h.Unlock(ctx))
				require.NoError(t, ends(t, w, safetyPoll+soon))
				if k.owned {
					h := mustLock(t, ctx, k.of(c, "orders"))
					forced, err := k.lock(c, "orders").ForceUnlock(ctx)
					require.NoError(t, err)
					require.True(t, forced)
					require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
				}
			}
			harness.Idle(t, c)
		}
	})
}

// Who may not set an expiry must not take anything for ever.
func TestExpiryForbidden(t *testing.T) {
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		c := restricted(t, s, nil, "-pexpire", "-expire", "-psetex", "-setex", "-set")
		for _, ctx := range k.owners(t, c) {
			err := only(k.of(c, "orders").TryLock(ctx))
			require.Error(t, err)
			if k.name != "red" { // for which it is not a majority
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
			}
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
			harness.Idle(t, c)
			k.unmake(t, s.Addr, "orders")
			require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
			k.prepare(t, s.Addr, "orders")
		}
	})
}

// On a server out of memory nobody takes anything, and who has something can keep it, leave it to another
// process, and give it back.
func TestOutOfMemory(t *testing.T) {
	const timeout = 3 * time.Second
	lasting := acquired // package countdown tests the latch
	eachKind(t, lasting, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		k.prepare(t, s.Addr, "free", "unnamed", "named")
		var holds []lock.Hold
		for what, ctx := range k.owners(t, c) {
			holds = append(holds, mustLock(t, ctx, k.of(c, what)))
		}
		waiter := k.waits(t, k.rival(c, "unnamed"), c)
		pass := func() {
			id, err := lock.Detach(t.Context(), holds[0], time.Minute)
			require.NoError(t, err)
			holds[0], err = k.of(c, holds[0].Name()).(adopter).Adopt(t.Context(), id)
			require.NoError(t, err)
		}
		if detachable(k) {
			pass() // has the script loaded
		}
		t.Cleanup(func() { harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0") })
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")
		for _, ctx := range k.owners(t, c) {
			err := only(k.of(c, "free").TryLock(ctx))
			require.ErrorContains(t, err, "OOM")
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
		}
		if detachable(k) {
			pass()
		}
		if k.leased {
			renewed := time.Now().Add(holds[0].Remaining() + timeout/4)
			harness.Eventually(t, soon, "it is renewed", func() bool { return time.Now().Add(holds[0].Remaining()).After(renewed) })
			require.NoError(t, holds[0].Extend(t.Context(), time.Minute))
		}
		for _, h := range holds {
			require.NoError(t, h.Unlock(t.Context()))
		}
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		require.NoError(t, ends(t, waiter, soon))
		require.NoError(t, k.of(c, "free").Do(t.Context(), nothing))
		k.unmake(t, s.Addr, "free", "unnamed", "named")
	})
}

// A key that never expires keeps waiters for ever: the error says so, and the log once for each client
// and name. It can be forced open.
func TestAKeyWithoutAnExpiry(t *testing.T) {
	const what = "without an expiry"
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		l := k.of(c, "orders")
		if !k.owned || k.timed {
			harness.Do(t, s.Addr, k.stored...)
			for _, err := range []error{only(l.TryLock(t.Context())), only(l.Lock(t.Context(), lock.Wait(50*time.Millisecond)))} {
				harness.NotAcquired(t, err)
			}
			harness.Do(t, s.Addr, "DEL", "orders")
			k.prepare(t, s.Addr, "orders")
			return
		}
		h := mustLock(t, t.Context(), k.rival(c, "orders"))
		require.NotContains(t, only(l.TryLock(t.Context())).Error(), "expiry")
		require.NoError(t, h.Unlock(t.Context()))
		held := [][]string{k.stored}
		if k.name == "read" || k.name == "write" {
			held = [][]string{{"HSET", "orders", "mode", "write", somebody + ":write", "1"}}
		}
		if k.name == "write" { // while readers have the lock, it waits in another way
			held = append(held, []string{"HSET", "orders", "mode", "read", somebody, "1"})
		}
		for _, stored := range held {
			harness.Do(t, s.Addr, stored...)
			for range 2 {
				for _, err := range []error{only(l.TryLock(t.Context())), only(l.Lock(t.Context(), lock.Wait(soon/10)))} {
					harness.NotAcquired(t, err)
					require.ErrorContains(t, err, "no expiry", "%q", stored)
				}
			}
			harness.Eventually(t, soon, "it is logged", func() bool { return strings.Contains(log.String(), what) })
			harness.Idle(t, c)
			require.Equal(t, 1, strings.Count(log.String(), what), log.String())
			harness.Do(t, s.Addr, "PEXPIRE", "orders", "60000")
			require.NotContains(t, only(l.TryLock(t.Context())).Error(), "expiry")
			harness.Do(t, s.Addr, "DEL", "orders")
			require.NoError(t, l.Do(t.Context(), nothing))
		}
		harness.Do(t, s.Addr, k.stored...)
		isTaken(t, k.rival(c, "orders"))
		ttl, err := k.lock(c, "orders").TTL(t.Context())
		require.NoError(t, err)
		require.Equal(t, lock.NoExpiry, ttl)
		forced, err := k.lock(c, "orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
	})
}

//go:build linux

package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// A call whose reply is lost finds its key again, and one that gives up leaves none.
func TestLostReply(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr})

	for i, try := range []bool{false, true} {
		name := fmt.Sprintf("lost-reply-%d", i)
		p.Set(testserver.Mute)
		call := harness.Start(t, t.Context(), func(ctx context.Context) (lock.Hold, error) {
			if try {
				return c.Lock(name).TryLock(ctx)
			}
			return c.Lock(name).Lock(ctx)
		})
		waiting(t, etcd, name, 1)
		p.Set(testserver.Pass)
		p.Cut()
		if try { // it makes one attempt for each endpoint
			assert.ErrorIs(t, call.End(), lock.ErrIndeterminate)
			nothingLeft(t, etcd, name)
			continue
		}
		h := call.Got()
		assert.Len(t, left(t, etcd, name), 1)
		require.NoError(t, h.Unlock(t.Context()))
		assert.Empty(t, left(t, etcd, name))
	}

	p.Set(testserver.Mute)
	ctx, cancel := context.WithCancel(t.Context())
	call := harness.StartLock(t, ctx, c.Lock("lost-reply"))
	waiting(t, etcd, "lost-reply", 1)
	cancel()
	assert.ErrorIs(t, call.End(), lock.ErrIndeterminate)
	assert.ErrorIs(t, call.Err, context.Canceled)
	p.Set(testserver.Pass)
	p.Cut()
	nothingLeft(t, etcd, "lost-reply")
}

// The reply that an acquisition has lost does not make the loss of the lock later uncertain.
func TestLostReplyIsForgotten(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr})
	p.Set(testserver.Mute)
	call := harness.StartLock(t, t.Context(), c.Lock("forgotten"))
	waiting(t, etcd, "forgotten", 1)
	p.Set(testserver.Pass)
	p.Cut()
	h := call.Got()
	for _, key := range left(t, etcd, "forgotten") {
		_, err := etcd.Delete(t.Context(), key)
		require.NoError(t, err)
	}
	err := h.Unlock(t.Context())
	assert.ErrorIs(t, err, lock.ErrLost)
	assert.NotErrorIs(t, err, lock.ErrIndeterminate)
}

// A release whose reply is lost is indeterminate, and is made.
func TestLostRelease(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr})
	h, err := c.Lock("lost-release").Lock(t.Context())
	require.NoError(t, err)
	p.Set(testserver.Mute)
	unlock := harness.Start(t, t.Context(), func(ctx context.Context) (struct{}, error) { return struct{}{}, h.Unlock(ctx) })
	nothingLeft(t, etcd, "lost-release")
	p.Set(testserver.Pass)
	p.Cut()
	assert.ErrorIs(t, unlock.End(), lock.ErrIndeterminate)
}

// A key that a late request makes is removed.
func TestLateRequest(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr})
	p.Set(testserver.Mute)
	ctx, cancel := context.WithCancel(t.Context())
	call := harness.StartLock(t, ctx, c.Lock("late"))
	waiting(t, etcd, "late", 1)
	key := left(t, etcd, "late")[0]
	id := leaseOf(t, etcd, "late")
	cancel()
	require.Error(t, call.End())
	p.Set(testserver.Pass)
	p.Cut()
	nothingLeft(t, etcd, "late")

	time.Sleep(ttl)
	_, err := etcd.Put(t.Context(), key, "", clientv3.WithLease(id))
	require.NoError(t, err)
	nothingLeft(t, etcd, "late")
	h, err := c.Lock("late").Lock(t.Context())
	require.NoError(t, err)
	assert.NotEqual(t, key, left(t, etcd, "late")[0])
	require.NoError(t, h.Unlock(t.Context()))
}

// isOf returns a function that reports whether a key is the claim of a hold.
func isOf(h lock.Hold) func(kv *mvccpb.KeyValue) bool {
	return func(kv *mvccpb.KeyValue) bool { return string(kv.Value) == lock.OwnerOf(h).String() }
}

// A hold whose key, or whose lease, was removed by hand is lost. A call that waits joins the queue again.
func TestRemoved(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	remove := map[string]func(t *testing.T, name string){
		"key": func(t *testing.T, name string) {
			for _, key := range left(t, etcd, name) {
				if strings.Contains(key, ",w-") {
					_, err := etcd.Delete(t.Context(), key)
					require.NoError(t, err)
				}
			}
		},
		"lease": func(t *testing.T, name string) {
			_, err := etcd.Revoke(t.Context(), leaseOf(t, etcd, name))
			require.NoError(t, err)
		},
	}
	for what, remove := range remove {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			name := "removed-" + what
			c := locksOf(t, etcd)
			h, err := c.Lock(name).Lock(t.Context())
			require.NoError(t, err)
			remove(t, name)
			lost(t, h, bound, lock.ReasonGone)
			h, err = c.Lock(name).Lock(t.Context(), lock.Wait(bound))
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))

			// Unlock notices it at once.
			h, err = c.Lock(name).Lock(t.Context(), lock.Wait(bound))
			require.NoError(t, err)
			remove(t, name)
			assert.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

			other := locksOf(t, etcd)
			held, err := other.Lock(name).Lock(t.Context())
			require.NoError(t, err)
			call := harness.StartLock(t, t.Context(), c.Lock(name))
			waiting(t, etcd, name, 2)
			mine := slices.DeleteFunc(claims(t, etcd, name), isOf(held))
			require.Len(t, mine, 1)
			if what == "key" {
				_, err = etcd.Delete(t.Context(), string(mine[0].Key))
			} else {
				_, err = etcd.Revoke(t.Context(), clientv3.LeaseID(mine[0].Lease))
			}
			require.NoError(t, err)
			waiting(t, etcd, name, 2)
			require.NoError(t, held.Unlock(t.Context()))
			require.NoError(t, call.Got().Unlock(t.Context()))
			nothingLeft(t, etcd, name)
		})
	}
}

// Extend of a hold whose key was removed ends it, and nothing of it stays.
func TestExtendRemoved(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	h, err := c.Lock("extend-removed").Lock(t.Context(), lock.Lease(time.Minute))
	require.NoError(t, err)
	id := leaseOf(t, etcd, "extend-removed")
	_, err = etcd.Delete(t.Context(), left(t, etcd, "extend-removed")[0])
	require.NoError(t, err)
	assert.ErrorIs(t, h.Extend(t.Context(), 2*time.Minute), lock.ErrLost)
	lost(t, h, bound, lock.ReasonGone)
	harness.Eventually(t, bound, "its lease is gone", func() bool {
		l, err := etcd.TimeToLive(t.Context(), id)
		return err == nil && l.TTL < 0
	})
}

// An extended hold notices as soon as any that its key was removed.
func TestExtendedRemoved(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	h, err := c.Lock("extended-removed").Lock(t.Context())
	require.NoError(t, err)
	require.NoError(t, h.Extend(t.Context(), time.Hour))
	_, err = etcd.Delete(t.Context(), left(t, etcd, "extended-removed")[0])
	require.NoError(t, err)
	lost(t, h, ttl/3+2*slack, lock.ReasonGone)
}

// between returns a client of etcd whose requests, but for streams, go through a function.
func between(t testing.TB, f func(method string, reply any, send func() error) error, addrs ...string) *clientv3.Client {
	t.Helper()
	intercept := func(
		ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		return f(method, reply, func() error { return invoke(ctx, method, req, reply, conn, opts...) })
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: addrs, Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(intercept)},
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A lease that is over before the key has it is no refusal.
func TestLeaseOver(t *testing.T) {
	t.Parallel()
	direct := connect(t, shared(t))
	var late atomic.Bool
	etcd := between(t, func(method string, reply any, send func() error) error {
		err := send()
		if late.Load() && method == "/etcdserverpb.Lease/LeaseGrant" {
			_, _ = direct.Revoke(t.Context(), clientv3.LeaseID(reply.(*pb.LeaseGrantResponse).ID)) // as etcd does
		}
		return err
	}, shared(t))
	c := locksOf(t, etcd)
	h, err := c.Lock("lease-over").Lock(t.Context())
	require.NoError(t, err)
	late.Store(true)
	assert.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrUnavailable)
	_, err = c.Lock("lease-over-2").Lock(t.Context(), lock.Lease(time.Second))
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	nothingLeft(t, etcd, "lease-over-2")
	assert.NoError(t, h.Unlock(t.Context()))
}

// A release whose first request does not arrive is made by one of two at once, and succeeds whichever answers first.
func TestReleaseTwice(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	etcd := between(t, func(method string, reply any, send func() error) error {
		if method != "/etcdserverpb.KV/DeleteRange" {
			return send()
		}
		if requests.Add(1) == 1 {
			return status.Error(codes.Unavailable, "lost")
		}
		err := send()
		if err == nil && reply.(*pb.DeleteRangeResponse).Deleted > 0 {
			time.Sleep(100 * time.Millisecond) // the other answers first
		}
		return err
	}, testserver.NewProxy(t, shared(t)).Addr, testserver.NewProxy(t, shared(t)).Addr)
	h, err := locksOf(t, etcd).Lock("release-twice").Lock(t.Context())
	require.NoError(t, err)
	require.NoError(t, h.Unlock(t.Context()))
	assert.Equal(t, int64(3), requests.Load())
}

// A request whose reply is lost, and that is repeated, has made one key.
func TestRepeatedRequest(t *testing.T) {
	t.Parallel()
	var lose atomic.Bool
	etcd := between(t, func(method string, _ any, send func() error) error {
		err := send()
		if method == "/etcdserverpb.KV/Txn" && lose.CompareAndSwap(true, false) {
			return status.Error(codes.Unavailable, "lost")
		}
		return err
	}, shared(t), testserver.NewProxy(t, shared(t)).Addr)
	c := locksOf(t, etcd)
	for name, take := range map[string]func(name string) (lock.Hold, error){
		"lock":   func(name string) (lock.Hold, error) { return c.Lock(name).Lock(t.Context()) },
		"try":    func(name string) (lock.Hold, error) { return c.Lock(name).TryLock(t.Context()) },
		"permit": func(name string) (lock.Hold, error) { return c.Semaphore(name, 2).TryLock(t.Context()) },
	} {
		name = "repeated-" + name
		lose.Store(true)
		h, err := take(name)
		require.NoError(t, err, name)
		kvs := claims(t, etcd, name)
		require.Len(t, kvs, 1, name)
		assert.Equal(t, kvs[0].CreateRevision, h.Token(), name)
		require.NoError(t, h.Unlock(t.Context()))
		nothingLeft(t, etcd, name)
	}
}

// A key that goes, and that a late request makes again, is not at the head of the queue.
func TestKeyMadeAgain(t *testing.T) {
	t.Parallel()
	const name = "made-again"
	direct := connect(t, shared(t))
	held, err := locksOf(t, direct).Lock(name).Lock(t.Context())
	require.NoError(t, err)
	mine := func() []*mvccpb.KeyValue { return slices.DeleteFunc(claims(t, direct, name), isOf(held)) }
	var requests atomic.Int64
	again := make(chan string, 1)
	var late *mvccpb.KeyValue // of the third request
	etcd := between(t, func(method string, _ any, send func() error) error {
		if method != "/etcdserverpb.KV/Txn" && method != "/etcdserverpb.KV/Range" {
			return send()
		}
		n := requests.Add(1)
		if n == 3 { // after the one that found the key
			late = mine()[0]
			_, err := direct.Delete(t.Context(), string(late.Key))
			require.NoError(t, err)
		}
		err := send()
		if n == 1 {
			return status.Error(codes.Unavailable, "lost")
		}
		if n == 3 {
			_, err := direct.Put(t.Context(), string(late.Key), string(late.Value), clientv3.WithLease(clientv3.LeaseID(late.Lease)))
			require.NoError(t, err)
			again <- string(late.Key)
		}
		return err
	}, shared(t))
	call := harness.StartLock(t, t.Context(), locksOf(t, etcd).Lock(name))
	key := harness.Receive(t, bound, "the late request", again)
	harness.Eventually(t, bound, "another key waits", func() bool {
		kvs := mine()
		return len(kvs) == 1 && string(kvs[0].Key) != key
	})
	assert.True(t, call.Running())
	require.NoError(t, held.Unlock(t.Context()))
	require.NoError(t, call.Got().Unlock(t.Context()))
	nothingLeft(t, direct, name)
}

// A wait whose context ends with the lease of its client has not acquired the lock, and etcd has refused nothing.
func TestWaitEndsWithTheLease(t *testing.T) {
	t.Parallel()
	c := locks(t, []string{shared(t)})
	assert.Equal(t, lock.ErrNotAcquired, etcdlock.Waited(c, rpctypes.ErrLeaseNotFound))
	assert.ErrorIs(t, etcdlock.Waited(c, lock.ErrUnavailable), lock.ErrUnavailable)
}

// What is certain of a hold counts from when the request was sent, however late the reply comes.
func TestLateReply(t *testing.T) {
	t.Parallel()
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr}, etcdlock.WithTTL(10*time.Second))
	const late = time.Second
	h, err := c.Lock("late-reply").Lock(t.Context())
	require.NoError(t, err)
	for _, lease := range []time.Duration{10 * time.Second, time.Minute} { // renewed, and with a lease of its own
		p.Set(testserver.Stall)
		sent := time.Now()
		extend := harness.Start(t, t.Context(), func(ctx context.Context) (struct{}, error) { return struct{}{}, h.Extend(ctx, lease) })
		time.Sleep(late)
		p.Set(testserver.Pass)
		require.NoError(t, extend.End())
		rest := lease - time.Since(sent)
		assert.GreaterOrEqual(t, h.Remaining(), rest-slack)
		assert.LessOrEqual(t, h.Remaining(), rest+late/2)
	}
	require.NoError(t, h.Unlock(t.Context()))
}

// Without a quorum calls end in time, and go on when it is back.
func TestNoQuorum(t *testing.T) {
	t.Parallel()
	members := startCluster(t, 3)
	c := locks(t, addrsOf(members), etcdlock.WithTTL(20*time.Second))
	h, err := c.Lock("no-quorum").Lock(t.Context())
	require.NoError(t, err)
	call := harness.StartLock(t, t.Context(), c.Lock("no-quorum"))
	waiting(t, connect(t, addrsOf(members)...), "no-quorum", 2)
	members[0].kill()
	members[1].kill()
	began := time.Now()
	_, err = c.Lock("no-quorum-2").Lock(t.Context(), lock.FailFast())
	assert.NotEqual(t, errors.Is(err, lock.ErrUnavailable), errors.Is(err, lock.ErrIndeterminate), "%v", err)
	assert.Less(t, time.Since(began), bound)
	next := harness.StartLock(t, t.Context(), c.Lock("no-quorum-3"))
	time.Sleep(time.Second)
	members[0].start()
	members[1].start()
	require.NoError(t, next.EndWithin(2*bound))
	require.NoError(t, next.Value.Unlock(t.Context()))
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, call.Got().Unlock(t.Context()))
	etcd := connect(t, addrsOf(members)...)
	for _, name := range []string{"no-quorum", "no-quorum-2", "no-quorum-3"} {
		nothingLeft(t, etcd, name)
	}
}

// A client that is cut off for a moment keeps its holds.
func TestShortOutage(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr}, etcdlock.WithTTL(6*time.Second))
	h, err := c.Lock("short-outage").Lock(t.Context())
	require.NoError(t, err)
	call := harness.StartLock(t, t.Context(), c.Lock("short-outage"))
	waiting(t, etcd, "short-outage", 2)
	p.Down()
	time.Sleep(3 * time.Second)
	p.Set(testserver.Pass)
	harness.Eventually(t, bound, "the lease is renewed", func() bool { return h.Remaining() > 4*time.Second })
	require.NoError(t, context.Cause(h.Context()))
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, call.Got().Unlock(t.Context()))
	nothingLeft(t, etcd, "short-outage")
}

// A hold that ends with an outage says what has prevented the renewal. Its client has another lease soon.
func TestLongOutage(t *testing.T) {
	t.Parallel()
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr})
	h, err := c.Lock("long-outage").Lock(t.Context())
	require.NoError(t, err)
	p.Down()
	harness.Receive(t, expiry, "the loss", h.Context().Done())
	var loss *lock.LostError
	require.ErrorAs(t, context.Cause(h.Context()), &loss)
	assert.Equal(t, lock.ReasonExpired, loss.Reason)
	assert.ErrorContains(t, loss.Err, "there is no connection to etcd")
	began := time.Now()
	_, err = c.Lock("long-outage").TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	assert.Less(t, time.Since(began), time.Second)
	p.Set(testserver.Pass)
	next, err := c.Lock("long-outage").Lock(t.Context(), lock.Wait(expiry))
	require.NoError(t, err)
	assert.Greater(t, next.Token(), h.Token())
	require.NoError(t, next.Unlock(t.Context()))
}

// A call that waits gets the lock although the revision from which it watches was compacted meanwhile.
func TestCompaction(t *testing.T) {
	t.Parallel()
	members := startCluster(t, 1)
	etcd := connect(t, members[0].addr)
	p := testserver.NewProxy(t, members[0].addr)
	other := locksOf(t, etcd)
	c := locks(t, []string{p.Addr}, etcdlock.WithTTL(time.Minute))
	h, err := other.Lock("compaction").Lock(t.Context())
	require.NoError(t, err)
	call := harness.StartLock(t, t.Context(), c.Lock("compaction"))
	waiting(t, etcd, "compaction", 2)
	time.Sleep(100 * time.Millisecond) // it watches
	p.Down()
	require.NoError(t, h.Unlock(t.Context()))
	var revision int64
	for range 10 {
		resp, err := etcd.Put(t.Context(), "x", "")
		require.NoError(t, err)
		revision = resp.Header.Revision
	}
	_, err = etcd.Compact(t.Context(), revision)
	require.NoError(t, err)
	p.Set(testserver.Pass)
	require.NoError(t, call.EndWithin(bound)) // the check comes after half a minute
	require.NoError(t, call.Value.Unlock(t.Context()))
	nothingLeft(t, etcd, "compaction")
}

// A user without rights is refused at once, and wrong credentials are like a server that cannot be asked.
func TestRights(t *testing.T) {
	t.Parallel()
	addr := startCluster(t, 1)[0].addr
	root := connect(t, addr)
	for _, do := range []func(ctx context.Context) error{
		func(ctx context.Context) error { _, err := root.UserAdd(ctx, "root", "root"); return err },
		func(ctx context.Context) error { _, err := root.UserGrantRole(ctx, "root", "root"); return err },
		func(ctx context.Context) error { _, err := root.UserAdd(ctx, "some", "some"); return err },
		func(ctx context.Context) error { _, err := root.RoleAdd(ctx, "some"); return err },
		func(ctx context.Context) error { _, err := root.UserGrantRole(ctx, "some", "some"); return err },
		func(ctx context.Context) error {
			_, err := root.RoleGrantPermission(ctx, "some", "redlatch/", clientv3.GetPrefixRangeEnd("redlatch/"),
				clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func(ctx context.Context) error { _, err := root.AuthEnable(ctx); return err },
	} {
		require.NoError(t, do(t.Context()))
	}

	nobody := locksOf(t, root) // etcd grants leases to all
	_, err := nobody.Lock("rights").TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	assert.ErrorIs(t, err, rpctypes.ErrUserEmpty)

	some, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, Username: "some", Password: "some", Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = some.Close() })
	c := locksOf(t, some)
	h, err := c.Lock("rights").Lock(t.Context())
	require.NoError(t, err)
	call := harness.StartLock(t, t.Context(), c.Lock("rights"))
	harness.Eventually(t, bound, "the lease was renewed", func() bool { return h.Remaining() < ttl*5/6 })
	harness.Eventually(t, bound, "the lease was renewed", func() bool { return h.Remaining() > ttl*5/6 })
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, call.Got().Unlock(t.Context()))

	elsewhere := locksOf(t, some, etcdlock.WithPrefix("elsewhere/"))
	began := time.Now()
	_, err = elsewhere.Lock("rights").Lock(t.Context())
	assert.ErrorIs(t, err, rpctypes.ErrPermissionDenied)
	for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate} {
		assert.NotErrorIs(t, err, kind)
	}
	assert.Less(t, time.Since(began), time.Second)
}

// An etcd without space refuses new keys at once, and releases locks.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	addr := startCluster(t, 1, "--quota-backend-bytes", "1000000")[0].addr
	etcd := connect(t, addr)
	c := locksOf(t, etcd)
	h, err := c.Lock("no-space").Lock(t.Context())
	require.NoError(t, err)
	other := locksOf(t, etcd)
	call := harness.StartLock(t, t.Context(), other.Lock("no-space"))
	waiting(t, etcd, "no-space", 2)
	data := strings.Repeat("x", 100_000)
	for i := 0; ; i++ {
		if _, err = etcd.Put(t.Context(), fmt.Sprint(i), data); err != nil {
			break
		}
	}
	require.ErrorIs(t, err, rpctypes.ErrNoSpace)

	_, err = c.Lock("no-space-2").Lock(t.Context())
	assert.ErrorIs(t, err, rpctypes.ErrNoSpace)
	assert.NotErrorIs(t, err, lock.ErrUnavailable)
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, call.Got().Unlock(t.Context()))
	nothingLeft(t, etcd, "no-space")
}

// Calls end when the client of etcd was closed first, and so does Close.
func TestClosedFirst(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	c := locksOf(t, etcd)
	h, err := c.Lock("closed-first").Lock(t.Context())
	require.NoError(t, err)
	call := harness.StartLock(t, t.Context(), c.Lock("closed-first"))
	waiting(t, connect(t, shared(t)), "closed-first", 2)
	require.NoError(t, etcd.Close())
	assert.ErrorIs(t, call.EndWithin(bound), lock.ErrClosed)
	_, err = c.Lock("closed-first").Lock(t.Context())
	assert.ErrorIs(t, err, lock.ErrClosed)
	assert.Error(t, h.Unlock(t.Context()))
	began := time.Now()
	c.Close()
	assert.Less(t, time.Since(began), 5*time.Second)
}

// A hold and the queue survive the death of the leader, and of the next one after the first is back.
func TestLeaderKilled(t *testing.T) {
	t.Parallel()
	members := startCluster(t, 3)
	c := locks(t, addrsOf(members), etcdlock.WithTTL(10*time.Second))
	other := locks(t, addrsOf(members), etcdlock.WithTTL(10*time.Second))
	var token int64
	for range 2 {
		h, err := c.Lock("leader-killed").Lock(t.Context())
		require.NoError(t, err)
		call := harness.StartLock(t, t.Context(), other.Lock("leader-killed"))
		waiting(t, connect(t, addrsOf(members)...), "leader-killed", 2)
		i := leader(t, members)
		members[i].kill()
		time.Sleep(time.Second)
		require.NoError(t, context.Cause(h.Context()))
		assert.True(t, call.Running())
		require.NoError(t, h.Unlock(t.Context()))
		next := call.Got()
		assert.Greater(t, next.Token(), h.Token())
		assert.Greater(t, h.Token(), token)
		token = next.Token()
		require.NoError(t, next.Unlock(t.Context()))
		members[i].start()
		leader(t, members)
	}
	nothingLeft(t, connect(t, addrsOf(members)...), "leader-killed")
}

// A member that hangs, with its connections open, costs no hold and does not keep a waiter from its lock. Each of
// two members hangs once, so that one of them has the watch.
func TestMemberHangs(t *testing.T) {
	t.Parallel()
	members := startCluster(t, 3)
	etcd := connect(t, addrsOf(members)...)
	for i := range 2 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			proxies := []*testserver.Proxy{testserver.NewProxy(t, members[0].addr), testserver.NewProxy(t, members[1].addr)}
			name := fmt.Sprintf("member-hangs-%d", i)
			c := locks(t, []string{proxies[0].Addr, proxies[1].Addr}, etcdlock.WithTTL(5*time.Second))
			mine, err := c.Lock(name + "-mine").Lock(t.Context())
			require.NoError(t, err)
			h, err := locksOf(t, etcd).Lock(name).Lock(t.Context())
			require.NoError(t, err)
			call := harness.StartLock(t, t.Context(), c.Lock(name))
			waiting(t, etcd, name, 2)
			time.Sleep(100 * time.Millisecond) // it watches
			proxies[i].Set(testserver.Stall)
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, call.EndWithin(bound))

			next := harness.StartLock(t, t.Context(), c.Lock(name))
			waiting(t, etcd, name, 2)
			require.NoError(t, call.Value.Unlock(t.Context()))
			require.NoError(t, next.EndWithin(bound))
			require.NoError(t, next.Value.Unlock(t.Context()))
			require.NoError(t, context.Cause(mine.Context()))
			require.NoError(t, mine.Unlock(t.Context()))
			nothingLeft(t, etcd, name)
		})
	}
}

// turns has the requests of a client of etcd come when it is the turn of the member that hangs: a request that is not of
// the lock comes first, until the other member has answered one. Requests at once share one such turn.
type turns struct {
	on      atomic.Bool
	current atomic.Int32
}

func (o *turns) take(ctx context.Context, method string, conn *grpc.ClientConn) {
	const foreign = "/etcdserverpb.KV/Range"
	if !o.on.Load() || method == foreign || method == "/etcdserverpb.Watch/Watch" {
		return
	}
	context.AfterFunc(ctx, func() { o.current.Add(-1) })
	if o.current.Add(1) > 1 {
		return
	}
	for answered := false; !answered && ctx.Err() == nil; {
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		answered = conn.Invoke(short, foreign, &pb.RangeRequest{Key: []byte("x")}, new(pb.RangeResponse)) == nil
		cancel()
	}
}

func (o *turns) unary(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	o.take(ctx, method, conn)
	return invoke(ctx, method, req, reply, conn, opts...)
}

func (o *turns) stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, begin grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	o.take(ctx, method, conn)
	return begin(ctx, desc, conn, method, opts...)
}

// A member that hangs costs each request one timeout at most, whatever requests of others come between the attempts.
func TestTurns(t *testing.T) {
	t.Parallel()
	hangs, other := testserver.NewProxy(t, shared(t)), testserver.NewProxy(t, shared(t))
	var o turns
	etcd, err := clientv3.New(clientv3.Config{
		Endpoints: []string{hangs.Addr, other.Addr}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(o.unary), grpc.WithChainStreamInterceptor(o.stream)},
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = etcd.Close() })
	c := locksOf(t, etcd, etcdlock.WithTTL(10*time.Second))
	h, err := c.Lock("turns-1").Lock(t.Context())
	require.NoError(t, err)
	for range 10 { // both are connected
		_, err = etcd.Get(t.Context(), "x")
		require.NoError(t, err)
	}

	hangs.Set(testserver.Stall)
	o.on.Store(true)
	const once = 2*time.Second + 2*slack // the timeout of an attempt, and the next one
	began := time.Now()
	next, err := c.Lock("turns-2").Lock(t.Context(), lock.Wait(bound))
	require.NoError(t, err)
	assert.Less(t, time.Since(began), once)
	began = time.Now()
	require.NoError(t, next.Unlock(t.Context()))
	assert.Less(t, time.Since(began), once)
	before := h.Remaining()
	harness.Eventually(t, bound, "the lease is renewed", func() bool { return h.Remaining() > before })
	c.Close()
	assert.Empty(t, left(t, connect(t, shared(t)), "turns-1"))
}

// A leader that is stopped costs no hold: another takes over, and renews the lease. If the leader is stopped for longer than
// the TTL it revokes nothing when it is back, if it asks first.
func TestLeaderStopped(t *testing.T) {
	t.Parallel()
	const ttl = 6 * time.Second
	members := startCluster(t, 3)
	c := locks(t, addrsOf(members), etcdlock.WithTTL(ttl))
	h, err := c.Lock("leader-stopped").Lock(t.Context())
	require.NoError(t, err)
	stopped := ttl / 2 // less than the rest of a lease that is renewed each third of its TTL
	if asksFirst(t, members[0]) {
		stopped = ttl + 2*time.Second
	}
	i := leader(t, members)
	members[i].stop()
	time.Sleep(stopped)
	members[i].resume()
	before := h.Remaining()
	harness.Eventually(t, ttl, "the lease is renewed", func() bool { return h.Remaining() > before })
	time.Sleep(2 * time.Second)
	require.NoError(t, context.Cause(h.Context()))
	require.NoError(t, h.Unlock(t.Context()))
}

// asksFirst reports whether a leader asks the others each time before it revokes a lease, or confirms a renewal. Before these
// releases it did not, and since then it does not if its clock has ticked, as it does once its process goes on.
func asksFirst(t testing.TB, m *member) bool {
	t.Helper()
	c := connect(t, m.addr)
	status, err := c.Status(t.Context(), m.addr)
	require.NoError(t, err)
	return slices.Contains([]string{"3.5.13", "3.5.14", "3.5.15"}, status.Version)
}

// holder is a process that holds a lock, and writes with IsOwner once a line says so.
func holder(args []string) error {
	return onClient(args[:1], func(ctx context.Context, etcd *clientv3.Client, c *etcdlock.Client) error {
		h, err := c.Lock(args[1]).Lock(ctx)
		if err != nil {
			return err
		}
		condition := c.IsOwner(h)
		last := time.Now()
		fmt.Println("token", h.Token())

		// The test stops the process here, which sees that it was stopped when it goes on.
		for now := last; now.Sub(last) <= ttl/2; now = time.Now() {
			last = now
			time.Sleep(time.Millisecond)
		}
		resp, err := etcd.Txn(ctx).If(condition).Then(clientv3.OpPut(args[1]+"-data", "stale")).Commit()
		if err != nil {
			return err
		}
		fmt.Println("written", resp.Succeeded)
		<-h.Context().Done()
		fmt.Println(context.Cause(h.Context()))
		if err := h.Unlock(ctx); !errors.Is(err, lock.ErrLost) {
			return fmt.Errorf("unlock: %w", err)
		}
		return nil
	})
}

// A process that is stopped for longer than the TTL loses its hold. When it goes on, its write is refused.
func TestProcessStopped(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := harness.Spawn(t, "holder", shared(t), "process-stopped")
	var old int64
	_, err := fmt.Sscanf(p.Line(bound), "token %d", &old)
	require.NoError(t, err)
	p.Signal(syscall.SIGSTOP)
	c := locksOf(t, etcd)
	h, err := c.Lock("process-stopped").Lock(t.Context(), lock.Wait(expiry+bound))
	require.NoError(t, err)
	assert.Greater(t, h.Token(), old)
	_, err = etcd.Put(t.Context(), "process-stopped-data", "new")
	require.NoError(t, err)
	p.Signal(syscall.SIGCONT)
	assert.Equal(t, "written false", p.Line(bound))
	assert.Contains(t, p.Line(bound), "lock lost")
	p.Ended(bound)
	data, err := etcd.Get(t.Context(), "process-stopped-data")
	require.NoError(t, err)
	assert.Equal(t, "new", string(data.Kvs[0].Value))
	require.NoError(t, h.Unlock(t.Context()))
}

// A process that dies loses its hold.
func TestProcessKilled(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := harness.Spawn(t, "holder", shared(t), "process-killed")
	p.Line(bound)
	c := locksOf(t, etcd)
	call := harness.StartLock(t, t.Context(), c.Lock("process-killed"))
	waiting(t, etcd, "process-killed", 2)
	p.Kill()
	require.NoError(t, call.EndWithin(expiry+bound))
	require.NoError(t, call.Value.Unlock(t.Context()))
	nothingLeft(t, etcd, "process-killed")
}

// Callers that give up while etcd does not answer leave nothing, and their number does not matter.
func TestManyGiveUp(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	p := testserver.NewProxy(t, shared(t))
	c := locks(t, []string{p.Addr})
	h, err := locksOf(t, etcd).Lock("give-up").Lock(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls sync.WaitGroup
	for range 200 {
		calls.Go(func() {
			_, err := c.Lock("give-up").Lock(ctx)
			assert.ErrorIs(t, err, context.Canceled)
		})
	}
	waiting(t, etcd, "give-up", 201)
	p.Set(testserver.Stall)
	cancel()
	calls.Wait()
	p.Set(testserver.Pass)
	waiting(t, etcd, "give-up", 1)
	require.NoError(t, h.Unlock(t.Context()))
}

// A hold ends before its lease is revoked: others may have the lock then.
func TestHoldsEndBeforeTheirLease(t *testing.T) {
	t.Parallel()
	const name = "ends-first"
	etcd := connect(t, shared(t))
	client := locks(t, []string{shared(t)})
	d, expire := etcdlock.Driver(client)
	there := make(chan []string, 1)
	_, err := d.Acquire(t.Context(), driver.Request{Name: name, Owner: client.NewOwner(), Lost: func(lock.Reason, error) {
		time.Sleep(50 * time.Millisecond) // in which a revoked lease would be gone
		there <- left(t, etcd, name)
	}})
	require.NoError(t, err)
	expire()
	require.Len(t, harness.Receive(t, bound, "the loss", there), 1)
	nothingLeft(t, etcd, name)
}

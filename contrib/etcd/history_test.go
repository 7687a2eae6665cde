//go:build linux

package etcdlock_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// faults is the duration of TestHistory. Ten minutes are
//
//	go test -race -run TestHistory -faults 10m -timeout 15m -v .
var faults = flag.Duration("faults", 0, "how long TestHistory has faults happen; by default 25s, and 8s with -short")

// resource is what a lock protects. It notes which holds overlap, and accepts no token that is less than one before.
type resource struct {
	t    *testing.T
	name string

	mu      sync.Mutex
	holder  lock.Hold
	by      *user
	token   int64
	holds   int
	refused int
}

// user is a client, behind proxies of its own.
type user struct {
	*etcdlock.Client
	etcd    *clientv3.Client
	proxies []*testserver.Proxy
	removed atomic.Int64 // the revision before which all its holds were removed by hand
}

// enter notes a hold. The one before must have ended, unless it was removed by hand.
func (r *resource) enter(u *user, h lock.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.Remaining() <= 0 {
		return // lost already, and others may have been noted
	}
	if r.holder != nil && r.holder.Remaining() > 0 && r.holder.Token() >= r.by.removed.Load() {
		r.t.Errorf("%s: two hold it, with the tokens %d and %d", r.name, r.holder.Token(), h.Token())
	}
	if last := r.holder; last != nil && h.Token() <= last.Token() {
		r.t.Errorf("%s: the token %d after %d", r.name, h.Token(), last.Token())
	}
	r.holder = h
	r.by = u
	r.holds++
}

// leave notes that a hold is unlocked now.
func (r *resource) leave(h lock.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder == h {
		r.holder = nil
	}
}

// write is a write by a holder who may have lost the lock.
func (r *resource) write(token int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if token < r.token {
		r.refused++
		return
	}
	r.token = token
}

// history is a run of TestHistory.
type history struct {
	t         *testing.T
	members   []*member
	asksFirst bool
	etcd      *clientv3.Client // without a proxy
	resources []*resource
	users     []*user
	process   *harness.Process

	losses  atomic.Int64
	refused atomic.Int64 // transactions with IsOwner
	faults  map[string]int
}

// TestHistory has clients and another process take locks under faults. Holds never overlap, tokens grow, and no write with
// an old token, or without the lock, is accepted.
func TestHistory(t *testing.T) {
	t.Parallel()
	d := 8 * time.Second
	if !testing.Short() {
		d = 25 * time.Second
	}
	if *faults > 0 {
		d = *faults
	}

	members := startCluster(t, 3)
	h := &history{t: t, members: members, asksFirst: asksFirst(t, members[0]), faults: make(map[string]int)}
	h.etcd = connect(t, addrsOf(members)...)
	for _, name := range historyNames {
		h.resources = append(h.resources, &resource{t: t, name: name})
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	var work sync.WaitGroup
	for range 4 {
		u := &user{}
		var addrs []string
		for _, m := range members {
			p := testserver.NewProxy(t, m.addr)
			u.proxies = append(u.proxies, p)
			addrs = append(addrs, p.Addr)
		}
		u.Client = locks(t, addrs)
		u.etcd = connect(t, addrs...)
		h.users = append(h.users, u)
		for range 2 {
			work.Go(func() {
				for ctx.Err() == nil {
					h.use(ctx, u, pick(h.resources))
				}
			})
		}
	}
	h.process = harness.Spawn(t, "writer", addrsOf(members)...)
	require.Equal(t, "0", h.process.Line(bound))

	for ctx.Err() == nil {
		what, heal := h.disturb()
		h.faults[what]++
		sleep(ctx, rand.N(ttl+time.Second))
		heal()
		sleep(ctx, time.Second)
	}
	work.Wait()
	h.process.Kill()

	t.Logf("%v: %v", d, h.faults)
	for _, r := range h.resources {
		t.Logf("%s: %d holds, %d writes with an old token", r.name, r.holds, r.refused)
		assert.Positive(t, r.holds)
		nothingLeft(t, h.etcd, r.name)
		h.checkData(r.name)
	}
	t.Logf("%d holds were lost, %d transactions were refused", h.losses.Load(), h.refused.Load())
}

var historyNames = []string{"history-1", "history-2", "history-3"}

func pick[T any](all []T) T { return all[rand.IntN(len(all))] }

// use takes a lock and writes, also after a loss.
func (h *history) use(ctx context.Context, u *user, r *resource) {
	var hold lock.Hold
	var err error
	if rand.IntN(4) == 0 {
		hold, err = u.Lock(r.name).TryLock(ctx)
	} else {
		hold, err = u.Lock(r.name).Lock(ctx, lock.Wait(5*time.Second))
	}
	if err != nil {
		for _, never := range []error{lock.ErrInvalid, lock.ErrLost, lock.ErrClosed, lock.ErrNotHeld} {
			assert.NotErrorIs(h.t, err, never)
		}
		return
	}

	r.enter(u, hold)
	condition := u.IsOwner(hold)
	time.Sleep(rand.N(20 * time.Millisecond))
	if rand.IntN(20) == 0 {
		sleep(ctx, rand.N(2*ttl))
	}
	r.write(hold.Token())
	if written, err := writeData(u.etcd, condition, r.name, hold.Token()); err == nil && !written {
		h.refused.Add(1)
	}
	r.leave(hold)
	if err := hold.Unlock(context.Background()); errors.Is(err, lock.ErrLost) {
		h.losses.Add(1)
	}
}

// writeData writes a token, beside those that were written before.
func writeData(etcd *clientv3.Client, condition clientv3.Cmp, name string, token int64) (written bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	key := fmt.Sprintf("%s-data/%d", name, rand.Uint64())
	resp, err := etcd.Txn(ctx).If(condition).Then(clientv3.OpPut(key, strconv.FormatInt(token, 10))).Commit()
	if err != nil {
		return false, err
	}
	return resp.Succeeded, nil
}

// writer is a process that takes locks and writes. It prints when it begins to hold one for a while, and zero at first.
func writer(addrs []string) error {
	return onClient(addrs, func(ctx context.Context, etcd *clientv3.Client, c *etcdlock.Client) error {
		fmt.Println(0)
		for {
			name := pick(historyNames)
			h, err := c.Lock(name).Lock(ctx, lock.Wait(5*time.Second))
			if err != nil {
				continue
			}
			condition := c.IsOwner(h)
			if rand.IntN(4) == 0 {
				fmt.Println(time.Now().UnixMilli())
				time.Sleep(4 * freshly)
			}
			_, _ = writeData(etcd, condition, name, h.Token())
			_ = h.Unlock(ctx)
		}
	})
}

// freshly is how old a line of the writer is at most that says that it holds a lock.
const freshly = 50 * time.Millisecond

// stopProcess stops the process while it holds a lock, for longer than it keeps its lease.
func (h *history) stopProcess() {
	for fresh := false; !fresh; {
		at, err := strconv.ParseInt(h.process.Line(3*bound), 10, 64)
		require.NoError(h.t, err)
		fresh = time.Since(time.UnixMilli(at)) < freshly
	}
	h.process.Signal(syscall.SIGSTOP)
	time.Sleep(expiry)
}

// revoke revokes the lease of a hold.
func (h *history) revoke() {
	r := pick(h.resources)
	r.mu.Lock()
	hold, u := r.holder, r.by
	r.mu.Unlock()
	if hold == nil {
		return
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), 2*bound)
	defer cancel()
	for _, kv := range claims(h.t, h.etcd, r.name) {
		if string(kv.Value) != lock.OwnerOf(hold).String() {
			continue
		}
		u.removed.Store(math.MaxInt64)
		defer h.removed(u)
		harness.Eventually(h.t, bound, "the lease is revoked", func() bool {
			_, err := h.etcd.Revoke(ctx, clientv3.LeaseID(kv.Lease))
			return err == nil || errors.Is(err, rpctypes.ErrLeaseNotFound)
		})
	}
}

// removed notes that the holds that these users have, or had, were removed by now.
func (h *history) removed(users ...*user) {
	now, err := h.etcd.Get(h.t.Context(), "x")
	require.NoError(h.t, err)
	for _, u := range users {
		u.removed.Store(now.Header.Revision)
	}
}

// stop stops a member. A leader that goes on may revoke leases that others have renewed.
func (h *history) stop(m *member) (heal func()) {
	leads := m == h.members[leader(h.t, h.members)]
	m.stop()
	return func() {
		if leads && !h.asksFirst {
			for _, u := range h.users {
				u.removed.Store(math.MaxInt64)
			}
			defer h.removed(h.users...)
			defer time.Sleep(ttl / 2)
		}
		m.resume()
	}
}

// disturb begins a fault, which heal ends.
func (h *history) disturb() (what string, heal func()) {
	m := pick(h.members)
	lead := h.members[leader(h.t, h.members)]
	u := pick(h.users)
	p := pick(u.proxies)
	pass := func() {
		for _, p := range u.proxies {
			p.Set(testserver.Pass)
		}
	}
	cut := func() {
		pass()
		p.Cut()
	}
	switch rand.IntN(13) {
	case 0:
		m.kill()
		return "member killed", m.start
	case 1:
		lead.kill()
		return "leader killed", lead.start
	case 2:
		return "member stopped", h.stop(m)
	case 3:
		return "leader stopped", h.stop(lead)
	case 4:
		h.stopProcess()
		return "process stopped", func() { h.process.Signal(syscall.SIGCONT) }
	case 5:
		h.revoke()
		return "lease revoked", func() {}
	case 6:
		p.Down()
		return "member refuses", pass
	case 7:
		p.Set(testserver.Stall)
		return "member silent", pass
	case 8:
		p.Set(pick([]testserver.Fault{testserver.Mute, testserver.StallRequests, testserver.StallReplies}))
		return "member half silent", cut
	case 9:
		for _, p := range u.proxies {
			p.Down()
		}
		return "client cut off", pass
	case 10:
		now, err := h.etcd.Get(h.t.Context(), "x")
		require.NoError(h.t, err)
		_, _ = h.etcd.Compact(h.t.Context(), now.Header.Revision)
		return "compaction", func() {}
	case 11:
		m.isolate(testserver.Stall)
		return "member without peers", func() { m.isolate(testserver.Pass) }
	case 12:
		lead.isolate(testserver.Stall)
		return "leader without peers", func() { lead.isolate(testserver.Pass) }
	}
	panic("no such fault")
}

// checkData fails the test if a write with an old token was accepted after one with a newer token.
func (h *history) checkData(name string) {
	ctx, cancel := context.WithTimeout(h.t.Context(), bound)
	defer cancel()
	data, err := h.etcd.Get(ctx, name+"-data/", clientv3.WithPrefix(),
		clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	require.NoError(h.t, err)
	last := 0
	for _, kv := range data.Kvs {
		token, err := strconv.Atoi(string(kv.Value))
		require.NoError(h.t, err)
		assert.GreaterOrEqual(h.t, token, last, "%s: a stale write", name)
		last = token
	}
	h.t.Logf("%s: %d writes", name, len(data.Kvs))
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// Many callers of several clients exclude each other, in the order in which they came.
func TestManyCallers(t *testing.T) {
	t.Parallel()
	etcd := connect(t, shared(t))
	var clients []*etcdlock.Client
	for range 4 {
		clients = append(clients, locks(t, []string{shared(t)}))
	}
	n, rounds := 0, 10
	if !testing.Short() {
		rounds = 50
	}
	var work sync.WaitGroup
	for i := range 16 {
		work.Go(func() {
			for range rounds {
				err := clients[i%len(clients)].Lock("many-callers").Do(t.Context(), func(context.Context) error {
					n++ // the race detector sees what is not exclusive
					return nil
				})
				assert.NoError(t, err)
			}
		})
	}
	work.Wait()
	assert.Equal(t, 16*rounds, n)
	nothingLeft(t, etcd, "many-callers")
	harness.Eventually(t, bound, "nobody waits", func() bool { return len(clients[0].Holds()) == 0 })
}

//go:build linux

package etcdlock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// resource is what a lock protects. It notes which holds overlap, and accepts no token that is less than one before.
type resource struct {
	t    *testing.T
	name string

	mu      sync.Mutex
	holder  lock.Hold
	token   int64
	holds   int
	refused int
}

// enter notes a hold. The one before must have ended.
func (r *resource) enter(h lock.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder != nil && r.holder.Remaining() > 0 {
		r.t.Errorf("%s: two hold it, with the tokens %d and %d", r.name, r.holder.Token(), h.Token())
	}
	if last := r.holder; last != nil && h.Token() <= last.Token() {
		r.t.Errorf("%s: the token %d after %d", r.name, h.Token(), last.Token())
	}
	r.holder = h
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

// TestHistory has clients take locks while members of the cluster die, hang and are cut off. Holds never overlap, tokens
// grow, and no write with an old token, or without the lock, is accepted.
func TestHistory(t *testing.T) {
	t.Parallel()
	d := 8 * time.Second
	if !testing.Short() {
		d = 25 * time.Second
	}
	members := startCluster(t, 3)
	old := version(t, members[0]) < "3.5.13"
	etcd := connect(t, addrsOf(members)...)
	start, err := etcd.Get(t.Context(), "x")
	require.NoError(t, err)

	names := []string{"history-1", "history-2", "history-3"}
	var resources []*resource
	for _, name := range names {
		resources = append(resources, &resource{t: t, name: name})
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	var proxies []*testserver.Proxy
	var work sync.WaitGroup
	var losses atomic.Int64
	for range 4 {
		var addrs []string
		for _, m := range members {
			p := testserver.NewProxy(t, m.addr)
			proxies = append(proxies, p)
			addrs = append(addrs, p.Addr)
		}
		c := locks(t, addrs)
		etcd := connect(t, addrs...)
		for range 2 {
			work.Go(func() {
				for ctx.Err() == nil {
					losses.Add(useLock(ctx, c, etcd, resources[rand.IntN(len(resources))]))
				}
			})
		}
	}

	for ctx.Err() == nil {
		heal := disturb(t, members, proxies, old)
		sleep(ctx, time.Duration(rand.IntN(int(ttl+time.Second))))
		heal()
		sleep(ctx, time.Second)
	}
	work.Wait()

	for i, r := range resources {
		t.Logf("%s: %d holds, %d writes with an old token", r.name, r.holds, r.refused)
		assert.Positive(t, r.holds)
		checkData(t, etcd, names[i]+"-data", start.Header.Revision)
		nothingLeft(t, etcd, r.name)
	}
	t.Logf("%d holds were lost", losses.Load())
}

// useLock takes a lock and writes, also after a loss. It returns 1 if the hold was lost.
func useLock(ctx context.Context, c *etcdlock.Client, etcd *clientv3.Client, r *resource) int64 {
	var h lock.Hold
	var err error
	if rand.IntN(4) == 0 {
		h, err = c.Lock(r.name).TryLock(ctx)
	} else {
		h, err = c.Lock(r.name).Lock(ctx, lock.Wait(5*time.Second))
	}
	if err != nil {
		return 0
	}

	r.enter(h)
	condition := c.IsOwner(h)
	time.Sleep(time.Duration(rand.IntN(int(20 * time.Millisecond))))
	if rand.IntN(20) == 0 {
		sleep(ctx, time.Duration(rand.IntN(int(2*ttl))))
	}
	r.write(h.Token())
	short, cancel := context.WithTimeout(context.Background(), time.Second)
	_, _ = etcd.Txn(short).If(condition).Then(clientv3.OpPut(r.name+"-data", strconv.FormatInt(h.Token(), 10))).Commit()
	cancel()
	r.leave(h)
	if err := h.Unlock(context.Background()); errors.Is(err, lock.ErrLost) {
		return 1
	}
	return 0
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// disturb begins a fault, which heal ends.
func disturb(t *testing.T, members []*member, proxies []*testserver.Proxy, old bool) (heal func()) {
	m := members[rand.IntN(len(members))]
	p := proxies[rand.IntN(len(proxies))]
	switch rand.IntN(5) {
	case 0:
		m.kill()
		return m.start
	case 1:
		if old && m == members[leader(t, members)] {
			return func() {} // this etcd may give the lock to another
		}
		m.stop()
		return m.resume
	case 2:
		p.Down()
	case 3:
		p.Set(testserver.Stall)
	case 4: // all connections of one client
		first := rand.IntN(len(proxies)/3) * 3
		for _, p := range proxies[first : first+3] {
			p.Down()
		}
		return func() {
			for _, p := range proxies[first : first+3] {
				p.Set(testserver.Pass)
			}
		}
	}
	return func() {
		p.Set(testserver.Pass)
		p.Cut()
	}
}

// checkData fails the test if a write with an old token was accepted after one with a newer token.
func checkData(t *testing.T, etcd *clientv3.Client, key string, from int64) {
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	last, err := etcd.Get(ctx, key)
	require.NoError(t, err)
	if len(last.Kvs) == 0 {
		return
	}
	token, writes := 0, 0
	for resp := range etcd.Watch(ctx, key, clientv3.WithRev(from)) {
		require.NoError(t, resp.Err())
		for _, event := range resp.Events {
			next, err := strconv.Atoi(string(event.Kv.Value))
			require.NoError(t, err)
			assert.GreaterOrEqual(t, next, token, "a stale write")
			token = next
			writes++
			if event.Kv.ModRevision == last.Kvs[0].ModRevision {
				t.Logf("%s: %d writes", key, writes)
				return
			}
		}
	}
	t.Errorf("%s: the watch has ended", key)
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

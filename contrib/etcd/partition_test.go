//go:build linux

package etcdlock_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A member that is cut off from the others, and not from clients, grants nothing. A client that has no other member loses
// its holds before others acquire, and one that has keeps them. All go on when the member is back.
func TestMemberWithoutPeers(t *testing.T) {
	t.Parallel()
	members := startCluster(t, 3)
	t.Run("follower", func(t *testing.T) { memberWithoutPeers(t, members, (leader(t, members)+1)%3) })
	t.Run("leader", func(t *testing.T) { memberWithoutPeers(t, members, leader(t, members)) })
}

func memberWithoutPeers(t *testing.T, members []*member, i int) {
	cut := members[i]
	others := addrsOf(slices.Delete(slices.Clone(members), i, i+1))
	etcd := connect(t, others...)
	name := func(of string) string { return "without-peers-" + of }
	locked := func(c *etcdlock.Client, of string) lock.Hold {
		h, err := c.Lock(name(of)).Lock(t.Context())
		require.NoError(t, err)
		return h
	}
	waits := func(c *etcdlock.Client, of string) *harness.Call[lock.Hold] {
		call := harness.StartLock(t, t.Context(), c.Lock(name(of)))
		waiting(t, etcd, name(of), 2)
		return call
	}

	// The session of the patient client outlasts the partition, and its watch is checked only afterwards. The one that
	// moves finds the others, after its first requests and its watch have gone to the member.
	const long = time.Minute
	far := locks(t, others, etcdlock.WithTTL(10*time.Second))
	near := locks(t, []string{cut.addr})
	patient := locks(t, []string{cut.addr}, etcdlock.WithTTL(long))
	all := connect(t, cut.addr)
	keeps := locksOf(t, all, etcdlock.WithTTL(10*time.Second))
	moves := locksOf(t, all, etcdlock.WithTTL(long))
	kept, lost, stays := locked(keeps, "kept"), locked(near, "lost"), locked(patient, "stays")
	passed, passedLate := locked(far, "passed"), locked(far, "passed-late")
	next, late, takes := waits(moves, "passed"), waits(patient, "passed-late"), waits(far, "lost")
	time.Sleep(100 * time.Millisecond) // they watch
	all.SetEndpoints(addrsOf(members)...)

	// Three clients take a lock from each other all the time.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h := &history{t: t, etcd: etcd}
	r := &resource{t: t, name: name("shared")}
	var work sync.WaitGroup
	for _, c := range []*etcdlock.Client{near, keeps, far} {
		u := &user{Client: c, etcd: etcd}
		work.Go(func() {
			for ctx.Err() == nil {
				h.use(ctx, u, r)
			}
		})
	}

	began := time.Now()
	cut.isolate(testserver.Stall)
	defer cut.isolate(testserver.Pass)
	ungranted := func(opts ...lock.Option) {
		t.Helper()
		began := time.Now()
		_, err := patient.Lock(name("free")).Lock(t.Context(), opts...)
		if assert.Error(t, err) {
			assert.NotErrorIs(t, err, lock.ErrNotAcquired)
		}
		assert.Less(t, time.Since(began), 2*time.Second+2*slack, "the timeout of a request, or the wait")
	}
	ungranted(lock.FailFast())
	require.NoError(t, passed.Unlock(t.Context()))
	require.NoError(t, passedLate.Unlock(t.Context()))
	require.NoError(t, next.EndWithin(bound), "the watch ends")

	require.NoError(t, takes.EndWithin(bound))
	var loss *lock.LostError
	require.ErrorAs(t, context.Cause(lost.Context()), &loss, "others have acquired")
	assert.Equal(t, lock.ReasonExpired, loss.Reason)
	assert.True(t, loss.When.Before(takes.At), "others acquired %v before", loss.When.Sub(takes.At))
	assert.Greater(t, takes.Value.Token(), lost.Token())
	_, err := near.Lock(name("free")).TryLock(t.Context())
	assert.ErrorIs(t, err, lock.ErrUnavailable)
	ungranted(lock.Wait(time.Second))
	ungranted(lock.FailFast())
	before := time.Now().Add(kept.Remaining())
	harness.Eventually(t, bound, "the lease is renewed", func() bool {
		return time.Now().Add(kept.Remaining()).After(before.Add(slack))
	})
	assert.True(t, late.Running())
	assert.Greater(t, time.Since(began), ttl)

	cut.isolate(testserver.Pass)
	mine := harness.StartLock(t, t.Context(), near.Lock(name("lost")))
	require.NoError(t, takes.Value.Unlock(t.Context()))
	require.NoError(t, mine.EndWithin(bound))
	require.NoError(t, late.EndWithin(bound))
	cancel()
	work.Wait()
	for _, h := range []lock.Hold{kept, stays, next.Value, late.Value, mine.Value} {
		require.NoError(t, context.Cause(h.Context()))
		require.NoError(t, h.Unlock(t.Context()))
	}

	// A request that arrives with the end of the partition may make a key that nobody has, until the lease is renewed.
	for _, of := range []string{"kept", "lost", "stays", "passed", "passed-late", "free", "shared"} {
		nothingLeftWithin(t, etcd, name(of), long/3+bound)
	}
	assert.Positive(t, r.holds)
	h.checkData(r.name)
	t.Logf("%d holds, %d were lost, %d transactions were refused", r.holds, h.losses.Load(), h.refused.Load())
}

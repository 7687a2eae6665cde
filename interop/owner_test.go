package interop

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// eachOwner runs a test for each kind of lock in which Go acts as a thread in Java, with an
// owner in its context. Java's interface accepts the number of a thread of its own client and
// no other owner, so Java cannot act as an owner in Go.
func (p *env) eachOwner(t *testing.T, test func(t *testing.T, kind string, java view, ours harness.Lock, asJava context.Context, owner lock.Owner)) {
	t.Helper()
	java, c := javaSide{p.theirs(t)}, p.ours(t)
	owner, err := lock.ParseOwner(fmt.Sprintf("%s:%d", java.id(), commander))
	require.NoError(t, err)
	same, err := lock.NewOwner(java.id(), commander)
	require.NoError(t, err)
	require.Equal(t, owner, same)
	ctx := lock.WithOwner(context.Background(), owner)
	t.Run("kinds", func(t *testing.T) {
		p.eachKind(t, func(t *testing.T, kind, name string) {
			test(t, kind, java.lock(kind, name), goLock(c, kind, name), ctx, owner)
		})
	})
}

func TestGoTakesOverHoldsOfJava(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachOwner(t, func(t *testing.T, kind string, java view, ours harness.Lock, asJava context.Context, owner lock.Owner) {
			ctx := context.Background()
			holds := func(n int) {
				require.Equal(t, n, java.holds(t, commander))
				require.Equal(t, n, harness.HoldCount(t, ours, owner))
			}
			java.take(t, commander, 0, time.Minute).gets(t, answers)
			if !reentrant(kind) {
				_, err := ours.TryLock(asJava)
				require.ErrorIs(t, err, lock.ErrReentered)
				holds(1)
				require.NoError(t, ours.Unlock(asJava))
				holds(0)
				require.False(t, java.locked(t))
				return
			}
			h, err := ours.TryLock(asJava, lock.Lease(time.Minute))
			require.NoError(t, err)
			holds(2)
			require.Equal(t, owner, h.Owner())
			require.NoError(t, h.Extend(ctx, time.Hour))
			require.Greater(t, java.ttl(t), 59*time.Minute)
			require.NoError(t, h.Unlock(ctx))
			holds(1)
			require.Greater(t, java.ttl(t), 30*time.Second, "Java's hold remains")
			// Java continues: it re-enters, and releases its first hold.
			java.take(t, commander, 0, time.Minute).gets(t, answers)
			holds(2)
			require.NoError(t, java.release(t, commander))
			holds(1)
			// Go releases Java's hold, and then the lock is free.
			require.NoError(t, ours.Unlock(asJava))
			holds(0)
			require.False(t, java.locked(t))
			require.ErrorIs(t, ours.Unlock(asJava), lock.ErrNotHeld)
			other := java.take(t, commander+1, 0, time.Minute)
			other.gets(t, answers)
			require.ErrorIs(t, ours.Unlock(asJava), lock.ErrNotHeld)
			require.ErrorIs(t, java.release(t, commander), lock.ErrNotHeld)
			require.NoError(t, java.release(t, commander+1))
		})
	})
}

func TestJavaTakesOverHoldsOfGo(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachOwner(t, func(t *testing.T, kind string, java view, ours harness.Lock, asJava context.Context, owner lock.Owner) {
			ctx := context.Background()
			h, err := ours.TryLock(asJava, lock.Lease(time.Hour))
			require.NoError(t, err)
			require.Equal(t, 1, java.holds(t, commander))
			again := java.take(t, commander, 0, time.Hour)
			if !reentrant(kind) {
				_, _, err := again.outcome(t, answers)
				require.ErrorIs(t, err, lock.ErrNotHeld) // which stands for all of its kind
				require.ErrorContains(t, err, "reentrant")
			} else {
				again.gets(t, answers)
				require.Equal(t, 2, harness.HoldCount(t, ours, owner))
				require.NoError(t, java.release(t, commander))
			}
			require.Equal(t, 1, harness.HoldCount(t, ours, owner))
			require.NoError(t, h.Extend(ctx, time.Hour))
			require.NoError(t, java.release(t, commander))
			require.False(t, java.locked(t))
			require.ErrorIs(t, h.Extend(ctx, time.Hour), lock.ErrLost)
			harness.Eventually(t, answers, "the context ends", func() bool { return h.Context().Err() != nil })
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
		})
	})
}

func TestDowngradeAcrossLanguages(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		java, c := javaSide{p.theirs(t)}, p.ours(t)
		owner, err := lock.NewOwner(java.id(), commander)
		require.NoError(t, err)
		asJava := lock.WithOwner(context.Background(), owner)
		const name = "orders"
		read, write := java.lock("read", name), java.lock("write", name)
		rw := c.RWLock(name)

		write.take(t, commander, 0, long).gets(t, answers)
		h, err := rw.Read().TryLock(asJava, lock.Lease(long))
		require.NoError(t, err)
		require.NoError(t, write.release(t, commander))
		read.take(t, 2, 0, long).gets(t, answers)
		_, err = rw.Write().TryLock(asJava)
		require.ErrorIs(t, err, lock.ErrUpgrade)
		require.NoError(t, read.release(t, 2))
		require.NoError(t, read.release(t, commander)) // the hold of Go
		require.ErrorIs(t, h.Unlock(context.Background()), lock.ErrLost)
		require.False(t, read.locked(t))

		w, err := rw.Write().TryLock(asJava, lock.Lease(long))
		require.NoError(t, err)
		read.take(t, commander, 0, long).gets(t, answers)
		require.NoError(t, w.Unlock(context.Background()))
		require.Equal(t, 1, harness.HoldCount(t, rw.Read(), owner))
		read.take(t, 2, 0, long).gets(t, answers)
		require.NoError(t, read.release(t, 2))
		require.NoError(t, rw.Read().Unlock(asJava))
		require.False(t, read.locked(t))
	})
}

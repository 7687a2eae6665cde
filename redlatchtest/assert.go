package redlatchtest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// AssertFree reports whether nobody holds l, and otherwise fails the test, which goes on. It asks the
// server. l is a lock of any kind, of a client or a Locker. A lock without a method IsLocked, such as
// a multi-lock, is free if TryLock acquires it, which is then unlocked. AssertFree does not wait for a
// lock to become free. It fails if the server does not answer within 10 s.
func AssertFree(tb testing.TB, l lock.Locker) bool {
	tb.Helper()
	return assertLocked(tb, l, false)
}

// AssertHeld reports whether somebody holds l, and otherwise fails the test. See AssertFree.
func AssertHeld(tb testing.TB, l lock.Locker) bool {
	tb.Helper()
	return assertLocked(tb, l, true)
}

func assertLocked(tb testing.TB, l lock.Locker, want bool) bool {
	tb.Helper()
	if l == nil {
		tb.Errorf("redlatchtest: the lock is nil")
		return false
	}

	locked, err := isLocked(l)
	if err != nil {
		tb.Errorf("redlatchtest: cannot tell whether the lock %q is held: %v", l.Name(), err)
	} else if locked != want {
		tb.Errorf("redlatchtest: the lock %q is %s", l.Name(), map[bool]string{true: "held", false: "free"}[locked])
	} else {
		return true
	}
	return false
}

// patience is how long an assertion waits for the server.
const patience = 10 * time.Second

func isLocked(l lock.Locker) (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	if l, ok := l.(interface {
		IsLocked(ctx context.Context) (bool, error)
	}); ok {
		return l.IsLocked(ctx)
	}
	h, err := l.TryLock(ctx)
	if errors.Is(err, lock.ErrNotAcquired) {
		return true, nil
	}
	if err != nil {
		return false, err
	}

	return false, h.Unlock(ctx)
}

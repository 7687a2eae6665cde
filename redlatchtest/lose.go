package redlatchtest

import (
	"context"
	"testing"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
)

// Lose ends the hold that ctx comes from as lost for that reason, so that a test sees how the work
// under it reacts: the hold's context ends with a *lock.LostError, which Unlock returns, and the
// lock on the server is released. The hold is one of any lock of a client (both sides of a read-write
// lock, a multi-lock and a Redlock included), a semaphore.Permit, or one of a Locker. ctx is its
// Context, the context that Do passes to its function, or a child of these; if several holds are
// nested, the innermost is lost. If the owner has several holds on the lock (see lock.WithOwner), all
// of them are lost.
//
// When Lose returns the context has ended. Lose blocks until the server has answered the release, for
// 5 s at most; without an answer, the lock is free when its lease ends. If ctx does not come from a
// hold, or the hold has ended, the test fails, and Lose returns false.
func Lose(tb testing.TB, ctx context.Context, reason lock.Reason) bool {
	tb.Helper()
	var h engine.ContextHold
	if ctx != nil {
		h = engine.From(ctx)
	}
	if h == nil {
		tb.Errorf("redlatchtest: Lose: the context does not come from a hold")
	} else if !h.Break(reason) {
		tb.Errorf("redlatchtest: Lose: the hold has ended before: %v", context.Cause(ctx))
	} else {
		return true
	}
	return false
}

package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/lock"
)

func TestFailed(t *testing.T) {
	dialTimeout := &net.OpError{Op: "dial", Net: "tcp", Err: &timeoutError{}}
	require.ErrorIs(t, dialTimeout, context.DeadlineExceeded)
	cutOff := &unanswered{3140 * time.Microsecond, context.DeadlineExceeded}
	lost := &lock.LostError{Name: "a", Reason: lock.ReasonGone}
	expired, cancel := context.WithTimeoutCause(t.Context(), -1, errors.New("late"))
	defer cancel()
	over, end := context.WithTimeoutCause(t.Context(), -1, lock.ErrNotAcquired) // as for a member of a group
	defer end()
	member := Object{"lock", "b"}.Failed(t.Context(), "acquire", time.Now(), lock.ErrNotAcquired)
	for _, tt := range []struct {
		ctx     context.Context
		err     error
		matches []error
		text    string
	}{
		{t.Context(), io.EOF, []error{lock.ErrIndeterminate, io.EOF}, `redlatch: outcome unknown: acquire "a" (waited 1.5s): EOF`},
		{t.Context(), dialTimeout, []error{lock.ErrUnavailable}, `redlatch: server unavailable: acquire "a" (waited 1.5s): dial tcp: i/o timeout`},
		{t.Context(), os.ErrDeadlineExceeded, []error{lock.ErrIndeterminate}, `redlatch: outcome unknown: acquire "a" (waited 1.5s): i/o timeout`},
		{t.Context(), context.DeadlineExceeded, []error{lock.ErrIndeterminate}, `redlatch: outcome unknown: acquire "a" (waited 1.5s): no reply in time`},
		{t.Context(), cutOff, []error{lock.ErrIndeterminate},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): the wait ended 3.1ms after the request was sent, before the answer`},
		{expired, cutOff, []error{lock.ErrIndeterminate, context.Cause(expired)},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): late; the wait ended 3.1ms after the request was sent, before the answer`},
		{expired, Undone(expired, errors.Join(lock.ErrNotAcquired, Classify(cutOff))), []error{lock.ErrNotAcquired, context.Cause(expired)},
			`redlatch: lock not acquired: acquire "a" (waited 1.5s): late; the wait ended 3.1ms after the request was sent, before the answer`},
		{expired, context.DeadlineExceeded, []error{lock.ErrIndeterminate, context.Cause(expired)},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): late`},
		{expired, errors.Join(lock.ErrNotAcquired, Classify(io.EOF)),
			[]error{lock.ErrIndeterminate, context.Cause(expired), io.EOF}, `redlatch: outcome unknown: acquire "a" (waited 1.5s): late; EOF`},
		{t.Context(), errors.Join(lock.ErrNotAcquired, NotAsked(Classify(io.EOF))), []error{lock.ErrUnavailable},
			`redlatch: server unavailable: acquire "a" (waited 1.5s): EOF`},
		{t.Context(), errors.Join(lock.ErrClosed, Classify(io.EOF)), []error{lock.ErrIndeterminate, lock.ErrClosed, io.EOF},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): client closed; EOF`},
		{t.Context(), member, []error{lock.ErrNotAcquired, member}, `redlatch: lock not acquired: acquire "a" (waited 1.5s): "b" is held by others`},
		{t.Context(), errors.Join(member, Classify(io.EOF)), []error{lock.ErrIndeterminate, io.EOF},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): "b" is held by others; EOF`},
		{t.Context(), errors.Join(lost, Classify(io.EOF)), []error{lock.ErrIndeterminate, lock.ErrLost, io.EOF},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): lock lost: "a": gone from the server; EOF`},
		{over, lock.ErrNotAcquired, []error{lock.ErrNotAcquired}, `redlatch: lock not acquired: acquire "a" (waited 1.5s)`},
		{t.Context(), errors.New("two\nlines"), []error{lock.ErrIndeterminate}, `redlatch: outcome unknown: acquire "a" (waited 1.5s): two; lines`},
		{t.Context(), fmt.Errorf("%w: %q", ErrWrongType, "x"), []error{ErrWrongType},
			`redlatch: acquire "a" (waited 1.5s): the key has a value of another type: "x"`},
		{t.Context(), errors.New("a\x1b[2Jb\xff" + strings.Repeat("x", 1000)), []error{lock.ErrIndeterminate},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): a\x1b[2Jb\xff` + strings.Repeat("x", text.Max-7) + "…"},
		{t.Context(), lost, []error{lost}, lost.Error()},
		{over, lock.ErrNotHeld, []error{lock.ErrNotHeld}, `redlatch: lock not held: acquire "a" (waited 1.5s)`},
		{t.Context(), Object{"lock", "b"}.Refused("release", lock.ErrNotHeld), []error{lock.ErrNotHeld},
			`redlatch: lock not held: acquire "a" (waited 1.5s): release "b"`},
		{t.Context(), errors.Join(Object{"lock", "b"}.Refused("release", lost), Classify(io.EOF)),
			[]error{lock.ErrIndeterminate, lock.ErrLost, io.EOF},
			`redlatch: outcome unknown: acquire "a" (waited 1.5s): lock lost: "a": gone from the server; EOF`},
	} {
		synctest.Test(t, func(t *testing.T) { // for the time
			err := Object{"lock", "a"}.Failed(tt.ctx, "acquire", time.Now().Add(-1500*time.Millisecond), tt.err)
			require.EqualError(t, err, tt.text)
			var call *lock.Error
			require.ErrorAs(t, err, &call)
			require.Equal(t, lock.Error{Op: "acquire", Kind: "lock", Name: "a", Waited: 1500 * time.Millisecond, Err: call.Err}, *call)
			for _, target := range append([]error{lock.ErrLost, lock.ErrNotHeld, io.EOF, context.Cause(expired), ErrWrongType}, append(kinds, timeouts...)...) {
				want := false
				for _, m := range tt.matches {
					want = want || errors.Is(m, target)
				}
				require.Equal(t, want, errors.Is(err, target), "%v: %v", err, target)
			}
		})
	}
	require.NoError(t, Object{"lock", "a"}.Failed(t.Context(), "acquire", time.Now(), nil))

	// A context that ended because of another failure lends its cause, but not its kind.
	unavailable := Object{"lock", "b"}.Failed(t.Context(), "acquire", time.Now(), Classify(dialTimeout))
	failedBefore, cancelCause := context.WithCancelCause(t.Context())
	cancelCause(unavailable)
	err := Object{"lock", "a"}.Failed(failedBefore, "acquire", time.Now(), lock.ErrNotAcquired)
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	require.ErrorIs(t, err, unavailable)
	require.NotErrorIs(t, err, lock.ErrUnavailable)
	require.ErrorAs(t, err, new(*net.OpError))
	require.NoError(t, NotAsked(errors.Join(lock.ErrIndeterminate, context.Canceled)), "the other caller has left")
	require.NoError(t, NotAsked(Classify(cutOff)), "the other caller has left")
	cut := errors.Join(lock.ErrNotAcquired, Classify(context.DeadlineExceeded))
	require.ErrorIs(t, cut, lock.ErrIndeterminate)
	for _, tt := range []struct{ err, kind error }{
		{cut, lock.ErrNotAcquired},
		{errors.Join(lock.ErrClosed, cut), lock.ErrClosed},
		{errors.Join(cut, io.EOF), lock.ErrIndeterminate},
		{io.EOF, nil},
	} {
		require.Equal(t, tt.kind, matching(Undone(expired, tt.err), kinds), "%v", tt.err)
	}
	broken := Classify(context.DeadlineExceeded) // a timeout of the connection
	require.Equal(t, broken, Undone(t.Context(), broken))
	err = Object{"lock", "a"}.ReadFailed(t.Context(), "look at", time.Now(), io.EOF)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.NotErrorIs(t, err, lock.ErrIndeterminate)
}

// A TryLock that fails is no exception.
func TestAFailureIsOneAllocation(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	for _, ctx := range []context.Context{t.Context(), ended} {
		require.LessOrEqual(t, testing.AllocsPerRun(100, func() {
			_ = Object{"lock", "a"}.Failed(ctx, "acquire", began, lock.ErrNotAcquired)
		}), 1.0)
	}
}

// timeoutError is an error like that of a dial that took too long.
type timeoutError struct{}

func (*timeoutError) Error() string        { return "i/o timeout" }
func (*timeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

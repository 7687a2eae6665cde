package wire

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/lock"
)

var (
	// kinds are the kinds of a failure, of which an error matches at most one, and ErrClosed also
	// beside ErrIndeterminate. If its causes are of several kinds, the first of them in this
	// order is its own: it promises the least.
	kinds = []error{lock.ErrIndeterminate, lock.ErrClosed, lock.ErrUnavailable, lock.ErrNotAcquired}
	// facts are errors that say all there is to say.
	facts = []error{
		lock.ErrLost, lock.ErrNotHeld, lock.ErrReentered, lock.ErrUpgrade, lock.ErrInvalid, lock.ErrUnsupported,
	}
	// timeouts must not be matched unless the caller's context has ended: the client's own
	// timeouts are not the caller's.
	timeouts = []error{context.DeadlineExceeded, context.Canceled, os.ErrDeadlineExceeded}
)

// KindOf returns the kind of a failed request: lock.ErrUnavailable if it had no effect and may
// succeed later, lock.ErrIndeterminate if that is unknown, and nil if the server has refused it.
func KindOf(err error) error {
	switch OutcomeOf(err) {
	case Passing:
		if isDeliberate(err) {
			return nil
		}
		return lock.ErrUnavailable
	case Unknown:
		return lock.ErrIndeterminate
	default:
		return nil
	}
}

// Classify joins the error of a request with its kind.
func Classify(err error) error {
	if kind := KindOf(err); kind != nil {
		return errors.Join(kind, err)
	}
	return err
}

// Undone returns the error of an acquisition under ctx that failed with err, now that the server has
// undone what it may have done. That is certain only if the end of the wait has cut the last attempt
// short: its connection is fine, so it preceded the undo.
func Undone(ctx context.Context, err error) error {
	over := ctx.Err() != nil || errors.Is(err, lock.ErrNotAcquired)
	if !over || !errors.Is(err, lock.ErrIndeterminate) {
		return err
	}

	causes := []error{lock.ErrNotAcquired}
	for _, cause := range split(err) {
		switch {
		case cause == lock.ErrIndeterminate, cause == lock.ErrNotAcquired:
		case cause == lock.ErrClosed, isEnd(cause):
			causes = append(causes, cause)
		default:
			return err
		}
	}

	return errors.Join(causes...)
}

// NotAsked returns the error of a caller that has sent no request, because the request of another caller
// has failed with err. It is nil if that only says that the other caller has left.
func NotAsked(err error) error {
	for _, cause := range split(err) {
		if isEnd(cause) {
			return nil
		}
	}
	return errors.Join(lock.ErrUnavailable, errors.New(Reason(err)))
}

// isEnd reports whether err only says that a context has ended.
func isEnd(err error) bool {
	_, left := err.(*unanswered)
	return left || err == context.Canceled || err == context.DeadlineExceeded
}

// Failure is the error of a public call. Its message is one line, and it matches one kind.
type Failure struct {
	kind       error // nil if the server has refused the request
	what, name string
	waited     time.Duration
	ended      error // the cause of the end of the caller's context, or nil
	err        error
}

// Failed returns the error of a public call that began then, under ctx, on the object of that
// name, if it is about one: nil if err is nil, and err itself if it states a fact. Otherwise the
// error has the kind that err matches, or else KindOf(err).
func Failed(ctx context.Context, what, name string, began time.Time, err error) error {
	if err == nil {
		return nil
	}
	return failed(ctx, what, name, began, err, lock.ErrIndeterminate)
}

// ReadFailed is Failed for a call that has no effect on the server, so that its outcome cannot
// be unknown.
func ReadFailed(ctx context.Context, what, name string, began time.Time, err error) error {
	if err == nil {
		return nil
	}
	return failed(ctx, what, name, began, err, lock.ErrUnavailable)
}

func failed(ctx context.Context, what, name string, began time.Time, err, unknown error) error {
	kind := matching(err, kinds)
	if kind == lock.ErrNotAcquired && replyIn(err) != nil {
		kind = nil // the wait is over, but not because others hold the lock
	} else if kind == nil {
		if fact := matching(err, facts); fact != nil && len(split(err)) == 1 {
			return err
		} else if fact != nil {
			kind = fact
		} else if kind = KindOf(err); kind == lock.ErrIndeterminate {
			kind = unknown
		}
	}
	f := &Failure{kind: kind, what: what, name: name, waited: time.Since(began), err: err}
	if kind != lock.ErrClosed {
		f.ended = context.Cause(ctx)
	}
	return f
}

func isKind(err error) bool { return slices.Contains(kinds, err) }

// matching returns the first of the targets that err matches, or nil.
func matching(err error, targets []error) error {
	if i := slices.IndexFunc(targets, func(target error) bool { return errors.Is(err, target) }); i >= 0 {
		return targets[i]
	}
	return nil
}

var joined = reflect.TypeOf(errors.Join(lock.ErrClosed))

// split returns the errors that errors.Join has joined.
func split(err error) []error {
	if reflect.TypeOf(err) != joined {
		return []error{err}
	}
	var all []error
	for _, one := range err.(interface{ Unwrap() []error }).Unwrap() {
		all = append(all, split(one)...)
	}
	return all
}

// Is reports whether f matches target: a kind if that is the kind of f, a timeout if the cause of the
// end of the context matches it, and another error if that cause or the error of the request does.
func (f *Failure) Is(target error) bool {
	if target == f.kind {
		return true
	}
	if isKind(target) && target != lock.ErrClosed {
		return false
	}
	if errors.Is(f.ended, target) {
		return true
	}
	return !slices.Contains(timeouts, target) && errors.Is(f.err, target)
}

// As is for errors.As.
func (f *Failure) As(target any) bool { return errors.As(f.ended, target) || errors.As(f.err, target) }

// Error implements error.
func (f *Failure) Error() string {
	kind := "redlatch"
	if f.kind != nil {
		kind = f.kind.Error()
	}
	text := fmt.Sprintf("%s: %s (waited %v)", kind, f.call(), f.waited.Round(time.Millisecond))
	if why := f.why(); why != "" {
		text += ": " + why
	}
	return text
}

func (f *Failure) call() string {
	if f.name == "" {
		return f.what
	}
	return fmt.Sprintf("%s %q", f.what, text.Cut(f.name))
}

// why returns the causes other than the kind, for the message.
func (f *Failure) why() string {
	causes := split(f.err)
	if f.ended != nil {
		causes = slices.DeleteFunc(causes, func(cause error) bool {
			return cause == context.Canceled || cause == context.DeadlineExceeded
		})
		causes = append([]error{f.ended}, causes...)
	}

	var lines []string
	for _, cause := range causes {
		if cause != f.kind && (!isKind(cause) || cause == lock.ErrClosed) {
			lines = append(lines, f.line(cause))
		}
	}

	return strings.Join(lines, "; ")
}

// Reason returns the causes of a Failure, or its kind, or else the message of err.
func Reason(err error) string {
	f, ok := err.(*Failure)
	if !ok {
		f = &Failure{err: err}
	}
	if why := f.why(); why != "" || f.kind == nil {
		return why
	}
	return strings.TrimPrefix(f.kind.Error(), "redlatch: ")
}

// line returns the cause's message without the part that is already in the message of f.
func (f *Failure) line(cause error) string {
	if inner, ok := cause.(*Failure); ok {
		if inner.kind == lock.ErrNotAcquired && inner.why() == "" {
			return fmt.Sprintf("%q is held by others", text.Cut(inner.name))
		}
		return inner.call() + ": " + Reason(inner)
	}

	if left, ok := cause.(*unanswered); ok {
		return left.when()
	}
	if cause == context.DeadlineExceeded && !errors.Is(f, cause) {
		return "no reply in time"
	}
	if IsWrongType(cause) && !errors.Is(cause, ErrWrongType) {
		return ErrWrongType.Error() + ": " + text.Safe(cause.Error())
	}
	if number := (*strconv.NumError)(nil); errors.As(cause, &number) { // its message has the value
		return ErrWrongType.Error()
	}

	line := cause.Error()
	if slices.Contains(kinds, f.kind) {
		line = strings.TrimPrefix(line, f.kind.Error()+": ")
	}
	return text.Safe(strings.ReplaceAll(strings.TrimPrefix(line, "redlatch: "), "\n", "; "))
}

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
	if slices.ContainsFunc(split(err), isEnd) {
		return nil
	}
	return errors.Join(lock.ErrUnavailable, errors.New(Reason(err)))
}

// isEnd reports whether err only says that a context has ended.
func isEnd(err error) bool {
	_, left := err.(*unanswered)
	return left || err == context.Canceled || err == context.DeadlineExceeded
}

// Object is what a public call is about, for its error.
type Object struct{ Kind, Name string }

// Failed returns the error of a call for op that began then, under ctx: nil if err is nil, and
// otherwise a *lock.Error that matches one kind, the one that err matches or else KindOf(err), or what
// err states as a fact. began is zero for a call that could send nothing.
func (o Object) Failed(ctx context.Context, op string, began time.Time, err error) error {
	if err == nil {
		return nil
	}
	return o.failed(ctx, op, began, err, lock.ErrIndeterminate)
}

// ReadFailed is Failed for a call that has no effect on the server, so that its outcome cannot
// be unknown.
func (o Object) ReadFailed(ctx context.Context, op string, began time.Time, err error) error {
	if err == nil {
		return nil
	}
	return o.failed(ctx, op, began, err, lock.ErrUnavailable)
}

// StoreFailed is Failed for a store whose errors say what they are: an error that matches no kind is a refusal, unless
// no connection could be made.
func (o Object) StoreFailed(ctx context.Context, op string, began time.Time, err error) error {
	if err == nil {
		return nil
	}
	return o.failed(ctx, op, began, err, nil)
}

// Ended returns the error of a call for op that began then, and that only the end of ctx has ended: it
// has no kind, because nothing has failed.
func (o Object) Ended(ctx context.Context, op string, began time.Time) error {
	return &lock.Error{Op: op, Kind: o.Kind, Name: o.Name, Waited: time.Since(began), Err: context.Cause(ctx)}
}

// Refused returns the error of a call for op that sends nothing because of err.
func (o Object) Refused(op string, err error) error {
	if err == nil {
		return nil
	}
	return &lock.Error{Op: op, Kind: o.Kind, Name: o.Name, Err: err}
}

func (o Object) failed(ctx context.Context, op string, began time.Time, err, unknown error) error {
	e := lock.Error{Op: op, Kind: o.Kind, Name: o.Name, Err: err}
	if !began.IsZero() {
		e.Waited = time.Since(began)
	}

	kind := matching(err, kinds)
	if kind == lock.ErrNotAcquired && err != kind && replyIn(err) != nil {
		kind = nil // the wait is over, but not because others hold the lock
	} else if kind == nil {
		if fact := matching(err, facts); fact != nil && len(split(err)) == 1 {
			return errorOf(e)
		} else if fact != nil {
			kind = fact
		} else if kind = KindOf(err); kind == lock.ErrIndeterminate {
			kind = unknown
			if inner := (*lock.Error)(nil); errors.As(err, &inner) {
				kind = nil // the member of a group has been refused by another store
			}
		}
	}
	var ended error
	if kind != lock.ErrClosed {
		ended = context.Cause(ctx)
	}
	if err == kind && ended == nil {
		return errorOf(e)
	}

	// One allocation: a caller that polls with a short deadline gets many of them.
	both := &struct {
		lock.Error
		cause failure
	}{e, failure{kind, ended, err}}
	both.Err = &both.cause
	return &both.Error
}

func errorOf(e lock.Error) error { return &e }

// failure is the cause of a lock.Error that says more than its kind. Its message is one line.
type failure struct {
	kind  error // nil if the server has refused the request
	ended error // the cause of the end of the caller's context, or nil
	err   error
}

// failureOf returns the cause of err, or of a lock.Error, as a failure.
func failureOf(err error) *failure {
	if e, ok := err.(*lock.Error); ok {
		err = e.Err
	}
	if f, ok := err.(*failure); ok {
		return f
	}
	if isKind(err) {
		return &failure{kind: err, err: err}
	}
	return &failure{err: err}
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
func (f *failure) Is(target error) bool {
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
func (f *failure) As(target any) bool { return errors.As(f.ended, target) || errors.As(f.err, target) }

// Error implements error.
func (f *failure) Error() string {
	why := f.why()
	if f.kind == nil {
		return why
	}
	if why == "" {
		return f.kind.Error()
	}
	return f.kind.Error() + ": " + why
}

// why returns the causes other than the kind, for the message.
func (f *failure) why() string {
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

// Reason returns the causes of a lock.Error, or its kind, or else the message of err.
func Reason(err error) string {
	f := failureOf(err)
	if why := f.why(); why != "" || f.kind == nil {
		return why
	}
	return strings.TrimPrefix(f.kind.Error(), "redlatch: ")
}

// line returns the cause's message without the part that is already in the message of f.
func (f *failure) line(cause error) string {
	if inner, ok := cause.(*lock.Error); ok {
		if lost, ok := inner.Err.(*lock.LostError); ok {
			return f.line(lost)
		}
		if own := failureOf(inner); own.kind == lock.ErrNotAcquired && own.why() == "" {
			return fmt.Sprintf("%q is held by others", text.Cut(inner.Name))
		}
		return fmt.Sprintf("%s %q: %s", inner.Op, text.Cut(inner.Name), Reason(inner))
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
	line = strings.ReplaceAll(strings.TrimPrefix(line, "redlatch: "), "\nredlatch: ", "\n")
	return text.Safe(strings.ReplaceAll(line, "\n", "; "))
}

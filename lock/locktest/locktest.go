// Package locktest checks that a lock keeps the contract of package lock. It is for stores that package driver connects,
// and for any other implementation of lock.Locker:
//
//	func TestConformance(t *testing.T) {
//		locktest.Run(t, locktest.Suite{
//			NewClient: func(t testing.TB) locktest.Client { return newClient(t) },
//			Kind:      "etcd", Fenced: true, Fair: true, Reentrant: true, Leased: true, Closes: true,
//			Settle:    200 * time.Millisecond,
//		})
//	}
//
// Run it with the race detector, and with goleak in TestMain: goroutines that stay are not its business.
package locktest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Client makes the locks of one process.
type Client interface {
	// Lock returns the lock of that name.
	Lock(name string) lock.Locker
	// Close closes the client. Repeated calls have no effect.
	Close()
}

// Suite describes the locks under test. What a zero field stands for, they do not have, and it is not tested.
type Suite struct {
	// NewClient returns a client like another process has it, which the end of the test closes. It is required.
	NewClient func(t testing.TB) Client
	// Kind is what the Kind of errors begins with. "": not checked.
	Kind string

	// Rival returns what nobody else holds at the same time, if several hold the lock of that name at once. It is the
	// write side of a read lock, for example.
	Rival func(c Client, name string) lock.Locker
	// RWLock and Semaphore return a read-write lock, and a semaphore, for the tests of what only they do.
	RWLock    func(c Client, name string) (read, write lock.Locker)
	Semaphore func(c Client, name string, permits int) lock.Locker

	Fenced    bool // holds have fencing tokens, which grow
	Fair      bool // waiters of all clients acquire in the order in which they came
	Reentrant bool // an owner named by lock.WithOwner can hold the lock several times
	Leased    bool // lock.Lease ends a hold, and others can acquire the lock then
	Extends   bool // Extend prolongs such a hold
	AtLeast   bool // lock.AtLeast is a valid option
	Closes    bool // clients are like processes: Close ends waits and holds, and others can acquire after Expiry at most
	Expires   bool // others can acquire a lock after Expiry at most if its holder is cut off

	// Settle is how soon a waiter acquires what was released, how soon a call has joined those that wait, and how soon
	// what was left is gone, at most, on an idle machine. The tests wait for it again and again. It is required.
	Settle time.Duration
	// Expiry is how soon the hold of a client that is cut off or closed is lost, and the lock free for others, at most.
	Expiry time.Duration

	// CutOff cuts a client off from the store, and restore ends that. Other clients are not cut off.
	CutOff func(t testing.TB, c Client) (restore func())
	// Open frees the lock of a name, for which nobody waits, as an operator does by hand.
	Open func(t testing.TB, name string)
	// Left returns what is stored for a name now, but for what is meant to stay. Each test ends when that is nothing.
	Left func(t testing.TB, name string) []string

	// Around runs a test, for example in a bubble of testing/synctest. NewClient, CutOff, Open and Left get the t that Around
	// has passed on. nil: the test runs as it is.
	Around func(t *testing.T, test func(t *testing.T))
	// Alone is set if tests do not run in parallel with each other.
	Alone bool
	// Skip has the reasons for tests that are not run, by their names.
	Skip map[string]string
}

// Run tests the locks, each promise in a subtest, in parallel, and blocks until they have ended. It takes longer without
// -short.
func Run(t *testing.T, s Suite) {
	if s.NewClient == nil || s.Settle <= 0 || (s.Expires || s.Closes) && s.Expiry <= 0 {
		t.Fatal("locktest: NewClient and Settle are required, and Expiry with Expires and Closes")
	}
	if s.Around == nil {
		s.Around = func(t *testing.T, test func(t *testing.T)) { test(t) }
	}

	t.Run("contract", func(t *testing.T) {
		for _, test := range tests {
			if test.needs == nil || test.needs(&s) {
				t.Run(test.name, func(t *testing.T) { s.test(t, test.name, test.run) })
			}
		}
	})
}

// test runs one test.
func (s *Suite) test(t *testing.T, name string, run func(e *env)) {
	if why := s.Skip[name]; why != "" {
		t.Skip(why)
	}
	if !s.Alone {
		t.Parallel()
	}
	s.Around(t, func(t *testing.T) {
		e := &env{T: t, Suite: s, names: fmt.Sprintf("locktest-%s-%d", name, runs.Add(1))}
		run(e)
		e.nothingLeft()
	})
}

var tests = []struct {
	name  string
	run   func(e *env)
	needs func(s *Suite) bool
}{
	{"exclusion", (*env).exclusion, nil},
	{"try", (*env).try, nil},
	{"wait", (*env).wait, nil},
	{"handover", (*env).handover, nil},
	{"order", (*env).order, func(s *Suite) bool { return s.Fair }},
	{"cancellation", (*env).cancellation, nil},
	{"do", (*env).do, nil},
	{"context", (*env).context, nil},
	{"parent", (*env).parent, nil},
	{"input", (*env).input, nil},
	{"names", (*env).differentNames, nil},
	{"unlock", (*env).unlocks, nil},
	{"detach", (*env).detach, nil},
	{"tokens", (*env).tokens, nil},
	{"extend", (*env).extend, func(s *Suite) bool { return s.Extends }},
	{"lease", (*env).lease, func(s *Suite) bool { return s.Leased }},
	{"max-hold", (*env).maxHold, nil},
	{"at-least", (*env).atLeast, func(s *Suite) bool { return s.AtLeast }},
	{"max-waiters", (*env).maxWaiters, nil},
	{"reentry", (*env).reentry, func(s *Suite) bool { return s.Reentrant }},
	{"owner-goroutines", (*env).ownerGoroutines, func(s *Suite) bool { return s.Reentrant }},
	{"owner-leases", (*env).ownerLeases, func(s *Suite) bool { return s.Reentrant && s.Leased }},
	{"close", (*env).closing, func(s *Suite) bool { return s.Closes }},
	{"cut-off", (*env).cutOff, func(s *Suite) bool { return s.CutOff != nil }},
	{"cut-off-calls", (*env).cutOffCalls, func(s *Suite) bool { return s.CutOff != nil }},
	{"opened", (*env).opened, func(s *Suite) bool { return s.Open != nil }},
	{"sharing", (*env).sharing, func(s *Suite) bool { return s.RWLock != nil }},
	{"permits", (*env).permits, func(s *Suite) bool { return s.Semaphore != nil }},
}

// runs makes the names of different tests different.
var runs atomic.Int64

// env is what one test has.
type env struct {
	*testing.T
	*Suite
	names string   // the names of its locks begin with it
	used  []string // names of locks
}

// soon bounds what takes a few round trips, on a busy machine.
const soon = 10 * time.Second

// slack is for pauses of the process, and moment is the least length of a lease.
const (
	slack  = time.Second
	moment = 500 * time.Millisecond
)

// size returns n, or less in a short run.
func size(short, n int) int {
	if testing.Short() {
		return short
	}
	return n
}

// client returns a new client.
func (e *env) client() Client {
	e.Helper()
	return e.NewClient(e.T)
}

// name returns the name of a lock of this test.
func (e *env) name(suffix string) string {
	name := e.names + suffix
	e.used = append(e.used, name)
	return name
}

// rival returns what nobody else holds at the same time as the lock of that name.
func (e *env) rival(c Client, name string) lock.Locker {
	if e.Rival != nil {
		return e.Rival(c, name)
	}
	return c.Lock(name)
}

// nothingLeft waits until nothing is stored for the names of the test.
func (e *env) nothingLeft() {
	e.Helper()
	if e.Left == nil {
		return
	}
	for _, name := range e.used {
		var left []string
		if !e.becomes(e.Settle+e.Expiry+soon, func() bool { left = e.Left(e.T, name); return len(left) == 0 }) {
			e.Errorf("what is left of %q: %q", name, left)
		}
	}
}

// becomes waits for a condition, and reports whether it came true within d.
func (e *env) becomes(d time.Duration, cond func() bool) bool {
	for deadline := time.Now().Add(d); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// must fails the test if err is an error.
func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// is fails the test unless err matches target.
func (e *env) is(err, target error) {
	e.Helper()
	if !errors.Is(err, target) {
		e.Fatalf("the error is %v, and not: %v", err, target)
	}
}

// isTrue fails the test unless ok is set.
func (e *env) isTrue(ok bool, format string, args ...any) {
	e.Helper()
	if !ok {
		e.Fatalf(format, args...)
	}
}

// within fails the test if the time since then is not from least to most, and some for pauses.
func (e *env) within(began time.Time, least, most time.Duration) {
	e.Helper()
	if d := time.Since(began); d < least || d > most+slack {
		e.Fatalf("it took %v: must be from %v to %v, and %v for pauses", d, least, most, slack)
	}
}

// hold acquires a lock, soon.
func (e *env) hold(ctx context.Context, l lock.Locker, opts ...lock.Option) lock.Hold {
	e.Helper()
	h, err := l.Lock(ctx, append([]lock.Option{lock.Wait(e.Settle + soon)}, opts...)...)
	e.must(err)
	if h.Name() != l.Name() {
		e.Fatalf("the hold of %q is on %q", l.Name(), h.Name())
	}
	return h
}

// unlock unlocks a hold that is not lost.
func (e *env) unlock(holds ...lock.Hold) {
	e.Helper()
	for _, h := range holds {
		e.must(context.Cause(h.Context()))
		e.must(h.Unlock(context.Background()))
	}
}

// taken fails the test unless others hold a lock.
func (e *env) taken(l lock.Locker) {
	e.Helper()
	began := time.Now()
	h, err := l.TryLock(e.Context())
	if err == nil {
		_ = h.Unlock(e.Context())
		e.Fatalf("nobody holds %q", l.Name())
	}
	e.failed(l, "acquire", err, nil, lock.ErrNotAcquired)
	e.within(began, 0, soon)
}

// free fails the test unless nobody holds a lock now.
func (e *env) free(l lock.Locker) {
	e.Helper()
	h, err := l.TryLock(e.Context())
	e.must(err)
	e.unlock(h)
}

// becomesFree fails the test unless a lock can be acquired after d at most.
func (e *env) becomesFree(l lock.Locker, d time.Duration) {
	e.Helper()
	began := time.Now()
	e.unlock(e.hold(e.Context(), l, lock.Wait(d+soon)))
	e.within(began, 0, d)
}

// kinds are the errors of which one matches at most one.
var kinds = []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate}

// failed fails the test unless err is an error of op that matches one of want. ended is the cause of the end of its
// context, nil if that has not ended.
func (e *env) failed(l lock.Locker, op string, err, ended error, want ...error) {
	e.Helper()
	var call *lock.Error
	if !errors.As(err, &call) {
		e.Fatalf("%T is no *lock.Error: %v", err, err)
	}
	if call.Op != op || call.Name != l.Name() || !strings.HasPrefix(call.Kind, e.Kind) {
		e.Fatalf("the error is of %q, %q, %q: %v", call.Op, call.Kind, call.Name, err)
	}

	matches, kind := 0, 0
	for _, target := range want {
		if errors.Is(err, target) {
			matches++
		}
	}
	for _, target := range kinds {
		if errors.Is(err, target) {
			kind++
		}
	}
	if matches != 1 || kind > 1 {
		e.Fatalf("the error matches %d of %v, and %d of %v: %v", matches, want, kind, kinds, err)
	}

	for _, end := range []error{ended, context.Canceled, context.DeadlineExceeded} {
		if end != nil && errors.Is(err, end) != (ended != nil && errors.Is(ended, end)) {
			e.Fatalf("the context has ended with %v, and the error is: %v", ended, err)
		}
	}

	text := err.Error()
	if strings.Contains(text, "\n") || !strings.HasPrefix(text, "redlatch: ") {
		e.Fatalf("the text is not one line that begins with the package: %s", text)
	}
	if errors.Is(err, lock.ErrLost) { // which may have the loss of a member
		return
	}
	if strings.Count(text, "redlatch: ") != 1 || strings.Contains(text, "(waited ") != (call.Waited > 0) {
		e.Fatalf("the text repeats itself, or does not say that the call waited %v: %s", call.Waited, text)
	}
}

// lost fails the test unless a hold is lost soon, for one of these reasons.
func (e *env) lost(h lock.Hold, within time.Duration, reasons ...lock.Reason) {
	e.Helper()
	select {
	case <-h.Context().Done():
	case <-time.After(within + slack):
		e.Fatalf("the hold has not ended after %v", within)
	}

	var loss *lock.LostError
	if !errors.As(context.Cause(h.Context()), &loss) {
		e.Fatalf("the cause is no loss: %v", context.Cause(h.Context()))
	}
	known := false
	for _, reason := range reasons {
		known = known || loss.Reason == reason
	}
	if !known || loss.Name != h.Name() || loss.Owner != lock.OwnerOf(h) || loss.When.After(time.Now()) {
		e.Fatalf("the loss is not right: %+v", loss)
	}
	e.is(loss, lock.ErrLost)
	if left := h.Remaining(); left != 0 {
		e.Fatalf("%v remain of a hold that is lost", left)
	}
}

// call is a call in the background.
type call struct {
	e    *env
	done chan struct{}
	hold lock.Hold // these are valid when done is closed
	err  error
}

// start calls Lock in the background.
func (e *env) start(ctx context.Context, l lock.Locker, opts ...lock.Option) *call {
	c := &call{e: e, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.hold, c.err = l.Lock(ctx, opts...)
	}()
	return c
}

// ends waits for the end of the call.
func (c *call) ends(within time.Duration) error {
	c.e.Helper()
	select {
	case <-c.done:
		return c.err
	case <-time.After(within + slack):
		c.e.Fatalf("a call has not returned after %v", within)
		return nil
	}
}

// got waits for the hold of the call.
func (c *call) got(within time.Duration) lock.Hold {
	c.e.Helper()
	c.e.must(c.ends(within))
	return c.hold
}

// waits fails the test if the call returns while it joins those that wait.
func (c *call) waits() {
	c.e.Helper()
	select {
	case <-c.done:
		c.e.Fatalf("a call does not wait: %v", c.err)
	case <-time.After(c.e.Settle):
	}
}

// owner returns the context of a new owner.
func (e *env) owner() context.Context {
	e.Helper()
	o, err := lock.NewOwner("6c6f636b-7465-4374-8000-000000000000", uint64(owners.Add(1)))
	e.must(err)
	return lock.WithOwner(e.Context(), o)
}

var owners atomic.Int64

func nothing(context.Context) error { return nil }

package interop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// side is a client of either language.
type side interface {
	String() string
	id() string // of the client
	lock(kind, name string) view
}

// view is a lock as one side sees it. Threads are numbers: the owner is the id of the client
// with that number.
type view interface {
	// take starts to acquire the lock. It does not wait if wait is 0, and waits without a
	// limit if wait is negative. A lease of 0 is renewed.
	take(t testing.TB, thread uint64, wait, lease time.Duration) *entry
	release(t testing.TB, thread uint64) error
	locked(t testing.TB) bool
	ttl(t testing.TB) time.Duration // 0 if it is free
	force(t testing.TB) bool
}

var errCancelled = errors.New("cancelled")

// forever is a wait without a limit.
const forever time.Duration = -1

// entry is an attempt to acquire a lock.
type entry struct {
	began   time.Time
	outcome func(t testing.TB, d time.Duration) (got bool, at time.Time, err error)
	ended   func() bool // whether outcome has a value
	cancel  func()
}

// gets fails the test unless the attempt succeeds within d. It returns the time of success.
func (e *entry) gets(t testing.TB, d time.Duration) time.Time {
	t.Helper()
	got, at, err := e.outcome(t, d)
	require.NoError(t, err)
	require.True(t, got, "the lock is taken")
	return at
}

// fails fails the test unless the attempt fails within d. It returns the time of failure.
func (e *entry) fails(t testing.TB, d time.Duration) time.Time {
	t.Helper()
	got, at, err := e.outcome(t, d)
	if !errors.Is(err, lock.ErrUnavailable) { // a busy server may not answer in time
		require.NoError(t, err)
	}
	require.False(t, got, "it acquired a held lock")
	return at
}

// kinds are the kinds of lock.
var kinds = []string{"lock", "non-reentrant", "fenced", "spin", "fair", "non-reentrant fair", "read", "write"}

// rival returns the kind of lock of the same name that no other owner can hold.
func rival(kind string) string {
	if kind == "read" {
		return "write"
	}
	return kind
}

// goSide is a client of redlatch.
type goSide struct {
	c *redlatch.Client
	// named makes threads named owners, which can re-enter; otherwise every acquisition has
	// its own owner.
	named bool
}

func (g goSide) String() string {
	if g.named {
		return "Go, named"
	}
	return "Go"
}

func (g goSide) id() string { return g.c.ID() }

func goLock(c *redlatch.Client, kind, name string) harness.Lock {
	switch kind {
	case "lock":
		return c.Lock(name)
	case "non-reentrant":
		return c.Lock(name, rlock.NonReentrant())
	case "fenced":
		return c.FencedLock(name)
	case "spin":
		return c.SpinLock(name)
	case "fair":
		return c.FairLock(name)
	case "non-reentrant fair":
		return c.FairLock(name, fairlock.NonReentrant())
	case "read":
		return c.RWLock(name).Read()
	case "write":
		return c.RWLock(name).Write()
	}
	panic("no kind " + kind)
}

func (g goSide) lock(kind, name string) view {
	return &goView{side: g, l: goLock(g.c, kind, name), held: map[uint64][]lock.Hold{}}
}

type goView struct {
	side goSide
	l    harness.Lock
	mu   sync.Mutex
	held map[uint64][]lock.Hold // the latest last
}

func (d *goView) as(t testing.TB, thread uint64) context.Context {
	if !d.side.named {
		return context.Background()
	}
	o, err := lock.NewOwner(d.side.id(), thread)
	require.NoError(t, err)
	return lock.WithOwner(context.Background(), o)
}

func (d *goView) take(t testing.TB, thread uint64, wait, lease time.Duration) *entry {
	t.Helper()
	t.Cleanup(d.close)
	return begun(t, d.as(t, thread), func(ctx context.Context) error {
		h, err := harness.Take(d.l, wait == 0)(ctx, options(wait, lease)...)
		if err == nil {
			d.mu.Lock()
			d.held[thread] = append(d.held[thread], h)
			d.mu.Unlock()
		}
		return err
	})
}

// holder returns the thread that has a hold of the claim with that id, and whether there is one.
func (d *goView) holder(id string) (thread uint64, is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for thread, holds := range d.held {
		if slices.ContainsFunc(holds, func(h lock.Hold) bool { return lock.OwnerOf(h).String() == id }) {
			return thread, true
		}
	}
	return 0, false
}

// close releases the remaining holds. Until then they are referenced, because a hold without
// references is released.
func (d *goView) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, holds := range d.held {
		for _, h := range holds {
			_ = h.Unlock(context.Background()) // it may have ended
		}
	}
	clear(d.held)
}

// options returns the options for that wait and lease of a view.
func options(wait, lease time.Duration) (opts []lock.Option) {
	if lease != 0 {
		opts = append(opts, lock.Lease(lease))
	}
	if wait > 0 {
		opts = append(opts, lock.Wait(wait))
	}
	return opts
}

// begun runs a function of Go that waits until its context ends.
func begun(t testing.TB, ctx context.Context, f func(ctx context.Context) error) *entry {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(cancel)
	type result struct {
		err error
		at  time.Time
	}
	done, began := make(chan result, 1), time.Now()
	go func() {
		err := f(ctx)
		done <- result{err, time.Now()}
	}()
	ended := func() bool { return len(done) > 0 }
	return &entry{began: began, ended: ended, cancel: cancel, outcome: func(t testing.TB, within time.Duration) (bool, time.Time, error) {
		t.Helper()
		select {
		case r := <-done:
			switch {
			case errors.Is(r.err, context.Canceled):
				return false, r.at, errCancelled
			case errors.Is(r.err, lock.ErrNotAcquired), errors.Is(r.err, lock.ErrIndeterminate), errors.Is(r.err, context.DeadlineExceeded):
				return false, r.at, nil
			}
			return r.err == nil, r.at, r.err
		case <-time.After(within):
			require.FailNow(t, "Go waits for longer than "+within.String())
			return false, time.Time{}, nil
		}
	}}
}

func (d *goView) release(t testing.TB, thread uint64) error {
	t.Helper()
	if d.side.named {
		return d.l.UnlockOwner(d.as(t, thread))
	}
	if h := d.latest(thread); h != nil {
		return h.Unlock(context.Background())
	}
	return lock.ErrNotHeld
}

// latest returns the latest hold of the thread, to be released, or nil.
func (d *goView) latest(thread uint64) lock.Hold {
	d.mu.Lock()
	defer d.mu.Unlock()
	last := len(d.held[thread]) - 1
	if last < 0 {
		return nil
	}
	h := d.held[thread][last]
	d.held[thread] = d.held[thread][:last]
	return h
}

func (d *goView) locked(t testing.TB) bool {
	t.Helper()
	return harness.IsLocked(t, d.l)
}

func (d *goView) ttl(t testing.TB) time.Duration {
	t.Helper()
	ttl, err := d.l.TTL(context.Background())
	require.NoError(t, err)
	return ttl
}

func (d *goView) force(t testing.TB) bool {
	t.Helper()
	was, err := d.l.ForceUnlock(context.Background())
	require.NoError(t, err)
	return was
}

// javaSide is a client of Redisson.
type javaSide struct{ c *redisson }

func (s javaSide) String() string { return "Java" }
func (s javaSide) id() string     { return s.c.id }

func (s javaSide) lock(kind, name string) view {
	return &javaView{c: s.c, object: s.c.object(kind, name)}
}

type javaView struct {
	c      *redisson
	object command
}

func (d *javaView) call(t testing.TB, method string, args ...any) *call {
	t.Helper()
	return d.c.of(t, d.object, method, args...)
}

// inJava returns a lease of a view in milliseconds, as Redisson expects it.
func inJava(lease time.Duration) int64 {
	if lease == 0 {
		return -1
	}
	return lease.Milliseconds()
}

func (d *javaView) take(t testing.TB, thread uint64, wait, lease time.Duration) *entry {
	t.Helper()
	var c *call
	switch {
	case wait == 0 && lease == 0:
		c = d.call(t, "tryLockAsync", thread)
	case wait >= 0:
		c = d.call(t, "tryLockAsync", wait.Milliseconds(), inJava(lease), ms, thread)
	default:
		c = d.call(t, "lockAsync", inJava(lease), ms, thread)
	}
	return c.entry(t, func(value json.RawMessage) bool { return string(value) != "false" }) // the result of lockAsync is null
}

// entry returns the call as an attempt. got reports whether a value means success.
func (c *call) entry(t testing.TB, got func(value json.RawMessage) bool) *entry {
	return &entry{
		began:  c.sent,
		ended:  func() bool { return len(c.done) > 0 },
		cancel: func() { c.cancel(t) },
		outcome: func(t testing.TB, within time.Duration) (bool, time.Time, error) {
			t.Helper()
			a, err := c.within(t, within)
			if waitWasOver(err) {
				return false, a.at, nil
			}
			return err == nil && got(a.Value), a.at, err
		},
	}
}

// waitWasOver reports whether Redisson threw the exception for a wait that ended before it had
// subscribed, as happens on a busy machine. Later it would have returned false.
func waitWasOver(err error) bool {
	thrown := (*javaError)(nil)
	return errors.As(err, &thrown) && strings.HasPrefix(thrown.message, "Unable to acquire subscription lock after")
}

func (d *javaView) release(t testing.TB, thread uint64) error {
	t.Helper()
	_, err := d.call(t, "unlockAsync", thread).within(t, answers)
	return err
}

func (d *javaView) locked(t testing.TB) bool {
	t.Helper()
	var is bool
	d.call(t, "isLocked").must(t, &is) // isLockedAsync of a read or write lock covers both
	return is
}

func (d *javaView) ttl(t testing.TB) time.Duration {
	t.Helper()
	var left json.Number
	d.call(t, "remainTimeToLiveAsync").must(t, &left)
	n, err := left.Int64()
	require.NoError(t, err)
	return max(time.Duration(n)*time.Millisecond, 0)
}

func (d *javaView) force(t testing.TB) bool {
	t.Helper()
	var was bool
	d.call(t, "forceUnlockAsync").must(t, &was)
	return was
}

// eachPair runs a test with Go first and Java second, the other way round, and with both kinds
// of owner in Go.
func (p *env) eachPair(t *testing.T, test func(t *testing.T, first, second side)) {
	t.Helper()
	java, ours := javaSide{p.theirs(t)}, p.ours(t)
	for _, s := range [][2]side{
		{goSide{ours, false}, java}, {java, goSide{ours, false}},
		{goSide{ours, true}, java}, {java, goSide{ours, true}},
	} {
		t.Run(fmt.Sprint(s[0], ", then ", s[1]), func(t *testing.T) { test(t, s[0], s[1]) })
	}
}

// eachKind runs a test for each kind of lock of the version of Redisson, in parallel, with
// unique names.
func (p *env) eachKind(t *testing.T, test func(t *testing.T, kind, name string)) {
	t.Helper()
	for _, kind := range kinds {
		if has(p.version, kind) {
			t.Run(kind, func(t *testing.T) {
				t.Parallel()
				test(t, kind, "orders of "+t.Name())
			})
		}
	}
}

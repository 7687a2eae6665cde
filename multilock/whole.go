package multilock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// whole is what a lock made of others has in common with one: its members, and how it
// is described.
type whole struct {
	s       *session.Session
	members []lock.Locker
	is      telemetry.Lock
	err     error // of the members
}

func newWhole(s *session.Session, kind string, members []lock.Locker) whole {
	w := whole{s: s, members: members, is: telemetry.Lock{Kind: kind}}
	if len(members) == 0 {
		w.err = fmt.Errorf("%w: a %s lock of no locks", lock.ErrInvalid, kind)
	}
	var names []string
	for i, m := range members {
		if isNil(m) {
			w.err = fmt.Errorf("%w: number %d of the locks of a %s lock is nil", lock.ErrInvalid, i+1, kind)
			return w
		}
		if name := m.Name(); !slices.Contains(names, name) { // one name on several servers
			names = append(names, name)
		}
	}
	w.is.Name = strings.Join(names, ",")
	return w
}

func isNil(m lock.Locker) bool {
	if m == nil {
		return true
	}
	v := reflect.ValueOf(m)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// check returns why there can be no attempt under ctx, or nil.
func (w *whole) check(ctx context.Context) error {
	if w.err != nil {
		return w.err
	}
	if err := w.s.Check(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	return nil
}

// life is that of a hold on the whole:
//
//	held ──end──▶ ended
//	  │             ▲
//	  └─lose─▶ lost ┘
type life struct {
	of    *whole
	owner lock.Owner
	site  callsite.Site
	span  *telemetry.Hold

	mu     sync.Mutex
	state  lifeState
	lost   *lock.LostError
	ctx    context.Context // what Context returns
	cancel context.CancelCauseFunc
}

type lifeState uint8

const (
	_ lifeState = iota // not acquired yet
	held
	lost
	ended
)

// begin is called when the whole is held.
func (l *life) begin(ctx context.Context) {
	l.owner, _ = lock.OwnerFrom(ctx)
	l.site = callsite.Here(3, 3) // begin, that of the hold, and acquire
	parent, span := l.of.s.Telemetry.StartHold(ctx, l.of.is, l.owner, 0)
	l.span = span
	l.ctx, l.cancel = context.WithCancelCause(parent)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = held
}

// lose ends a life as lost and reports whether it was held.
func (l *life) lose(reason lock.Reason, cause error) bool {
	l.mu.Lock()
	if l.state != held {
		l.mu.Unlock()
		return false
	}
	l.state = lost
	l.lost = &lock.LostError{Name: l.of.is.Name, Owner: l.owner, Reason: reason, When: time.Now(), Err: cause}
	l.cancel(l.lost)
	l.mu.Unlock()
	// Not here: this may be the watchdog's goroutine, and an exporter may block.
	l.background(func(context.Context) { l.span.End(l.lost) })
	return true
}

// background calls f on a goroutine of its own, also while the client is being closed.
func (l *life) background(f func(ctx context.Context)) {
	if !l.of.s.Go(f) {
		go f(context.Background())
	}
}

// end ends a life by Unlock. It returns nil if it was held, and else what Unlock is to
// say.
func (l *life) end() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch l.state {
	case held:
		l.state = ended
		l.cancel(context.Canceled) // before anybody else can have the lock
		return nil
	case lost:
		l.state = ended
		return l.lost
	default:
		return fmt.Errorf("%w: Unlock %q", lock.ErrNotHeld, l.of.is.Name)
	}
}

// released ends the spans of a release that has come to err, and returns that.
func (l *life) released(err error, done func(error)) error {
	done(err)
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	l.span.End(lostErr)
	return err
}

// current returns nil while it is held, and else why it is not.
func (l *life) current(op string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch l.state {
	case held:
		return nil
	case lost:
		return l.lost
	default:
		return fmt.Errorf("%w: %s %q", lock.ErrNotHeld, op, l.of.is.Name)
	}
}

// body is what makes a hold of a life.
type body interface {
	alive() *life
	remaining() time.Duration
	extend(ctx context.Context, lease time.Duration) error
	unlock(ctx context.Context) error
}

// handle is what the caller holds. Nothing points to it, so that one that is dropped can
// be noticed.
type handle struct {
	b       body
	cleanup runtime.Cleanup
}

func newHandle(b body) *handle {
	hd := &handle{b: b}
	hd.cleanup = runtime.AddCleanup(hd, dropped, b)
	return hd
}

// dropped runs when a handle was collected.
func dropped(b body) {
	l := b.alive()
	if l.current("") != nil {
		return
	}
	l.of.s.Logger.Error("redlatch: a hold was dropped without Unlock; releasing it",
		"name", l.of.is.Name, "kind", l.of.is.Kind, "acquired", l.site.String())
	l.background(func(ctx context.Context) { _ = b.unlock(ctx) }) // members may be of clients that are open
}

func (hd *handle) Name() string             { return hd.b.alive().of.is.Name }
func (hd *handle) Owner() lock.Owner        { return hd.b.alive().owner }
func (hd *handle) Token() int64             { return 0 }
func (hd *handle) Context() context.Context { return hd.b.alive().ctx }

func (hd *handle) Remaining() time.Duration {
	d := hd.b.remaining()
	runtime.KeepAlive(hd)
	return d
}

func (hd *handle) Extend(ctx context.Context, lease time.Duration) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	if err := lock.CheckLease(lease); err != nil {
		return err
	}
	err := hd.b.extend(ctx, lease)
	runtime.KeepAlive(hd)
	return err
}

func (hd *handle) Unlock(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	hd.cleanup.Stop()
	err := hd.b.unlock(ctx)
	runtime.KeepAlive(hd)
	return err
}

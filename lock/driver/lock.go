package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// object is what Lock and Semaphore share. It is immutable.
type object struct {
	c       *Client
	id      telemetry.Lock
	shared  bool
	permits int
	err     error // of the name, the permits or the client
}

func (c *Client) object(kind, name string, shared bool, permits int) object {
	o := object{c: c, id: telemetry.Lock{Kind: c.store + kind, Name: name}, shared: shared, permits: permits, err: c.err}
	if o.err == nil {
		o.err = cmp.Or(wire.CheckName(name, false), c.d.CheckName(name))
	}
	return o
}

// Name returns the name that was passed to the client.
func (l *object) Name() string { return l.id.Name }

// info returns what errors name.
func (l *object) info() wire.Object { return wire.Object(l.id) }

func (l *object) key() key { return key{l.id.Name, l.permits > 0} }

// lockID identifies the lock among all locks of the process.
func (l *object) lockID() engine.LockID {
	return engine.LockID{Client: l.c.id, Key: engine.Key{Kind: l.c.store, Name: l.id.Name}}
}

// Lock acquires the lock, or a permit. See lock.Locker.
func (l *object) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return open(ctx, l, false, opts)
}

// TryLock makes one attempt to acquire the lock, or a permit. See lock.Locker.
func (l *object) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return open(ctx, l, true, opts)
}

// Do runs fn while it holds the lock, or a permit. See lock.Locker.
func (l *object) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, l.info(), l, fn, opts...)
}

// Lock is a lock on a store, or one side of a read-write lock: a lock.Locker. Client.Lock creates it. Its holds cannot be
// detached.
//
// An owner named by lock.WithOwner re-enters what it holds: its holds share one claim on the store. The claim of a writer
// that reads too excludes others until the last of its holds ends. A call that finds another call of its owner waiting waits for
// the result of that one, also with lock.FailFast.
//
// It can be a member of Client.MultiLock.
type Lock struct {
	object
	member
}

type member = engine.StoreMember

// Lock returns the lock of that name. It is the write side of the RWLock of that name. It sends nothing. If the name is
// invalid, each acquisition returns an error that matches lock.ErrInvalid.
func (c *Client) Lock(name string) *Lock { return c.lock("", name, false) }

func (c *Client) lock(kind, name string, shared bool) *Lock {
	l := &Lock{object: c.object(kind, name, shared, 0)}
	l.member = engine.NewStoreMember(grouped{&l.object})
	return l
}

// UnlockOwner ends the latest hold that the owner of ctx has in this process, or has lost. It blocks like Hold.Unlock and
// returns the same errors; lock.ErrInvalid if ctx names no owner, lock.ErrNotHeld if that has no hold here.
func (l *Lock) UnlockOwner(ctx context.Context) error {
	if err := cmp.Or(session.CheckContext(ctx), l.err, closedError(l.c.ctx)); err != nil {
		return l.info().Refused("release", err)
	}
	owner, ok := lock.OwnerFrom(ctx)
	if !ok {
		return l.info().Refused("release", engine.ErrNoOwner)
	}

	for _, h := range slices.Backward(l.takenBy(owner)) {
		if err := h.Unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
			return err
		}
	}
	return l.info().Refused("release", engine.NotHeldBy(owner))
}

// takenBy returns the holds that an owner has by an object of this kind, and those that it has lost without having heard
// of it from Unlock. The latest is the last.
func (l *Lock) takenBy(owner lock.Owner) (taken []*hold) {
	l.c.mu.Lock()
	defer l.c.mu.Unlock()

	for _, h := range l.c.lost {
		if h.l.id == l.id && h.claim.owner == owner {
			taken = append(taken, h)
		}
	}
	if cl := l.c.owned[ownedKey{l.key(), owner}]; cl != nil {
		for _, h := range cl.holds {
			if h.l.id == l.id {
				taken = append(taken, h)
			}
		}
	}

	slices.SortStableFunc(taken, func(a, b *hold) int { return a.begun.Compare(b.begun) })
	return taken
}

// RWLock is a read-write lock. Client.RWLock creates it.
type RWLock struct{ read, write *Lock }

// RWLock returns the read-write lock of that name. See Client.Lock.
func (c *Client) RWLock(name string) *RWLock {
	return &RWLock{c.lock("-read", name, true), c.lock("-write", name, false)}
}

// Read returns the side that only writers exclude.
func (l *RWLock) Read() *Lock { return l.read }

// Write returns the side that readers and other writers exclude.
func (l *RWLock) Write() *Lock { return l.write }

// Semaphore is a number of permits: a lock.Locker, each hold of which is one permit. Client.Semaphore creates it. The
// owner of lock.WithOwner is ignored.
type Semaphore struct{ object }

// Semaphore returns the semaphore of that name, which has nothing to do with the lock of that name. All processes must
// use the same number of permits, which is at least 1. See Client.Lock.
func (c *Client) Semaphore(name string, permits int) *Semaphore {
	s := &Semaphore{c.object("-semaphore", name, false, permits)}
	if permits < 1 {
		s.err = cmp.Or(s.err, fmt.Errorf("%w: %d permits: must be at least 1", lock.ErrInvalid, permits))
	}
	return s
}

// closedError returns lock.ErrClosed if a context of the client has ended.
func closedError(ctx context.Context) error {
	if ctx.Err() != nil {
		return lock.ErrClosed
	}
	return nil
}

// orClosed returns err, which is also lock.ErrClosed if a context of the client has ended.
func orClosed(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	return errors.Join(lock.ErrClosed, err)
}

// open is Lock, or TryLock if try is set.
func open[O lock.Option](ctx context.Context, l *object, try bool, opts []O) (lock.Hold, error) {
	o, err := engine.Resolve(l.shared, opts)
	if err == nil && o.AtLeast > 0 && l.permits > 0 {
		err = fmt.Errorf("%w: AtLeast: a permit has no least time", lock.ErrInvalid)
	}
	if err = cmp.Or(err, session.CheckContext(ctx), l.err); err != nil {
		return nil, l.info().Refused("acquire", err)
	}

	w := &call{l: l, ctx: ctx, options: o, once: try || o.Bounded && o.Wait == 0}
	if l.permits == 0 {
		w.owner, _ = lock.OwnerFrom(ctx)
		if !w.once {
			l.c.nested.Warn(ctx, l.c.log, l.id, l.lockID())
		}
	}

	h, err := w.acquire()
	if err != nil {
		return nil, err
	}
	return engine.NewHandle(h), nil
}

// call is a call that acquires.
type call struct {
	l        *object
	ctx      context.Context // of the caller
	owner    lock.Owner      // that the caller named, or zero
	options  lock.Options
	once     bool
	member   bool // of a group
	site     callsite.Site
	began    time.Time
	attempts int
}

// errGone is returned if a claim has ended before its caller had a hold of it.
var errGone = fmt.Errorf("%w: its lease was over before the caller had it", lock.ErrNotAcquired)

// acquire is the call.
func (w *call) acquire() (*hold, error) {
	l := w.l
	w.site = callsite.Of(w.options.Site)
	w.began = time.Now()
	if w.ctx.Err() != nil {
		return nil, l.info().Failed(w.ctx, "acquire", w.began, lock.ErrNotAcquired)
	}
	if !l.c.enter() {
		return nil, l.info().Refused("acquire", lock.ErrClosed)
	}
	defer l.c.leave()

	ctx, span := l.c.tel.StartAcquire(w.ctx, l.id)
	h, err := w.granted(ctx)
	if err != nil {
		err = l.info().StoreFailed(w.ctx, "acquire", w.began, err)
	}

	ended := false
	defer func() {
		if !ended && err == nil { // an exporter has panicked
			_ = h.Unlock(w.ctx)
		}
	}()
	span.End(w.ctx, w.attempts, w.attempts > 1, err)
	ended = true
	return h, err
}

// granted acquires a claim, or a hold of the one that the owner has.
func (w *call) granted(ctx context.Context) (*hold, error) {
	c := w.l.c
	ctx, cancel := until(ctx, c.stopCtx)
	defer cancel()
	if w.options.Bounded && !w.once {
		bounded, cancel := context.WithDeadline(ctx, w.began.Add(w.options.Wait))
		defer cancel()
		ctx = bounded
	}

	for {
		cl, err := w.claim()
		if err != nil {
			return nil, err
		}

		var h *hold
		if cl.by == w {
			h, err = w.request(ctx, cl)
		} else {
			h, err = w.join(ctx, cl)
		}
		again := cl.by != w || !w.once && w.options.Lease == 0 // a short lease may be over each time
		if err == errGone && again && ctx.Err() == nil {
			continue
		}
		return h, orClosed(c.stopCtx, err)
	}
}

// claim returns the claim that the owner has or requests, or else a new one, which this call has to request.
func (w *call) claim() (*claim, error) {
	c := w.l.c
	of := ownedKey{w.l.key(), w.owner}
	c.mu.Lock()
	cl := c.owned[of]
	c.mu.Unlock()
	if cl != nil {
		cl.check() // its time may be over
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	if cl = c.owned[of]; cl != nil {
		if cl.l.shared && !w.l.shared {
			return nil, fmt.Errorf("%w: by owner %v", lock.ErrUpgrade, w.owner)
		}
		return cl, nil
	}
	if err := closedError(c.stopCtx); err != nil {
		return nil, err
	}

	cl = &claim{l: w.l, owner: w.owner, id: c.NewOwner(), by: w, settled: make(chan struct{})}
	if !w.owner.IsZero() {
		c.owned[of] = cl
	}
	return cl, nil
}

// join returns another hold of a claim of the same owner, when the call that requests it has it. The error is errGone if
// that is not so.
func (w *call) join(ctx context.Context, cl *claim) (*hold, error) {
	select {
	case <-cl.settled:
		return cl.hold(w)
	default:
	}
	if w.once {
		return nil, lock.ErrNotAcquired
	}

	select {
	case <-cl.settled:
		return cl.hold(w)
	case <-ctx.Done():
		return nil, lock.ErrNotAcquired
	}
}

// request makes the request for a claim, and returns the first hold of it.
func (w *call) request(ctx context.Context, cl *claim) (*hold, error) {
	defer cl.settle()
	r := Request{
		Name: w.l.id.Name, Owner: cl.id, Shared: w.l.shared, Permits: w.l.permits, Try: w.once,
		FailFast: w.options.FailFast || w.once, Lost: func(reason lock.Reason, err error) { cl.lose(reason, err) },
	}
	if w.owner.IsZero() { // otherwise the claim may have holds that last longer
		r.Lease = w.options.Lease
	}
	if w.once {
		return w.attempt(ctx, cl, r)
	}

	if w.options.MaxWaiters > 0 || w.member { // which asks whether the call has to wait
		first := r
		first.Try = true
		first.FailFast = true
		h, err := w.attempt(ctx, cl, first)
		if err == nil || ctx.Err() != nil || err == errGone || !w.waits(err) {
			return h, err
		}
		r.Owner = cl.renew() // the store may not have removed the other yet
	}

	if n, ok := w.waitUnless(w.options.MaxWaiters); !ok {
		return nil, engine.Crowded(n)
	}
	defer w.waited()
	return w.attempt(ctx, cl, r)
}

// attempt makes a request.
func (w *call) attempt(ctx context.Context, cl *claim, r Request) (*hold, error) {
	w.attempts++
	granted, err := w.l.c.d.Acquire(ctx, r)
	if err != nil {
		return nil, err
	}
	return cl.begin(w, granted)
}

// waits reports whether the call goes on after an attempt that has failed with err.
func (w *call) waits(err error) bool {
	if errors.Is(err, lock.ErrNotAcquired) {
		return true
	}
	return !w.options.FailFast && (errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate))
}

// waitUnless notes that the call waits, unless most others do, which is no bound if it is 0. It returns their number.
func (w *call) waitUnless(most int) (n int, ok bool) {
	c := w.l.c
	c.mu.Lock()
	defer c.mu.Unlock()

	calls := c.waits[w.l.key()]
	if most > 0 && len(calls) >= most {
		return len(calls), false
	}
	if calls == nil {
		calls = make(map[*call]struct{})
		c.waits[w.l.key()] = calls
	}
	calls[w] = struct{}{}
	return len(calls), true
}

// waited notes that the call does not wait any more.
func (w *call) waited() {
	c := w.l.c
	c.mu.Lock()
	defer c.mu.Unlock()

	calls := c.waits[w.l.key()]
	delete(calls, w)
	if len(calls) == 0 {
		delete(c.waits, w.l.key())
	}
}

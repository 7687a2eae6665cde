package redlatchtest

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Locker is a lock.Locker in memory, without a server and without a client: for unit tests of code
// that takes a lock.Locker. NewLocker creates it. It keeps the contract of package lock, and is fair:
// calls of Lock acquire it in the order in which they came. Its other methods let a test cause what a
// real lock does only at bad times.
//
// It uses no goroutines while nobody calls it, and no clock but the clock of package time, so it works
// under testing/synctest.
//
// It differs from the lock of a client in this: a hold has a fencing token, which rises with every
// acquisition, as a hold of a FencedLock does; Detach returns an error that matches
// lock.ErrUnsupported; a hold that the caller drops stays held, so that AssertFree finds it; and no
// warning is logged if a call waits for its own caller.
type Locker struct {
	name string

	mu                   sync.Mutex
	claim                *claim         // what has the lock, or nil
	queue                []*acquisition // those that wait, in order; empty while the lock is free
	token                int64          // of the latest claim
	delay                time.Duration  // of acquisitions
	lockErrs, unlockErrs []error        // for the calls to come
}

// NewLocker returns a Locker that is free. Each call returns a lock of its own, even with the same
// name. If the name is invalid, each acquisition returns an error that matches lock.ErrInvalid.
func NewLocker(name string) *Locker { return &Locker{name: name} }

// Name implements lock.Locker.
func (l *Locker) Name() string { return l.name }

// object returns what errors name.
func (l *Locker) object() wire.Object { return wire.Object{Kind: "lock", Name: l.name} }

// failed returns an error of a test as one of a call, unless it is one.
func (l *Locker) failed(op string, err error) error {
	if _, ok := err.(*lock.Error); ok {
		return err
	}
	return l.object().Refused(op, err)
}

// Lock implements lock.Locker. A hold without lock.Lease counts as renewed until it ends. After
// lock.MaxHold the lock is held for 30 s more, or until Unlock.
func (l *Locker) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := engine.Resolve(false, opts)
	if err != nil {
		return nil, l.object().Refused("acquire", err)
	}
	return l.acquire(ctx, o, o.Bounded && o.Wait == 0)
}

// TryLock implements lock.Locker.
func (l *Locker) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	o, err := engine.Resolve(false, opts)
	if err != nil {
		return nil, l.object().Refused("acquire", err)
	}
	return l.acquire(ctx, o, true)
}

// Do implements lock.Locker.
func (l *Locker) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, l.object(), l, fn, opts...)
}

// IsLocked reports whether the lock is held. It does not block. If ctx is nil or the name is
// invalid, the error matches lock.ErrInvalid.
func (l *Locker) IsLocked(ctx context.Context) (bool, error) {
	if err := l.check(ctx); err != nil {
		return false, l.object().Refused("read", err)
	}
	l.enter()
	defer l.mu.Unlock()
	return l.claim != nil, nil
}

// Waiting returns the number of waiters: calls of Lock and Do, and other owners of HoldElsewhere. A
// test can release a lock when the code under test waits for it. Waiting does not block.
func (l *Locker) Waiting() int {
	l.enter()
	defer l.mu.Unlock()
	return len(l.queue)
}

// HoldElsewhere has another owner acquire the lock, like another process, and hold it until release
// is called. It does not block: if the lock is held, the other owner waits in the queue. Repeated
// calls of release have no effect.
func (l *Locker) HoldElsewhere() (release func()) {
	a := l.newAcquisition(context.Background(), lock.Options{})
	a.elsewhere = true
	l.enter()
	l.request(a)
	l.mu.Unlock()
	return func() { l.leave(a) }
}

// Lose ends the current hold as lost for that reason: the hold's context ends with a
// *lock.LostError, which Unlock returns. The lock is free then, or held by the first waiter. If the
// owner has several holds (see lock.WithOwner), all of them are lost. Lose does not block. It
// reports whether there was a hold.
func (l *Locker) Lose(reason lock.Reason) bool {
	l.enter()
	defer l.mu.Unlock()
	if l.claim == nil || len(l.claim.holds) == 0 {
		return false
	}
	l.loseAll(reason)
	return true
}

// DelayLock makes each acquisition from now on take at least d, like one from a slow server: Lock, Do
// and TryLock block for that time, unless their wait ends before. The initial d is 0.
func (l *Locker) DelayLock(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = d
}

// FailLock makes the next calls of Lock, TryLock and Do fail, each with one of errs, in their order.
// They return it as the cause of a *lock.Error, at once or after the time of DelayLock. A *lock.Error is
// returned as it is, and a nil error lets a call pass. Another call of FailLock adds to what is left. A
// call with an invalid argument, or whose context has ended, uses no error up.
func (l *Locker) FailLock(errs ...error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lockErrs = append(l.lockErrs, errs...)
}

// FailUnlock makes the next calls of Unlock return errs, one each, as FailLock does for acquisitions.
// The holds end, and the lock becomes free, all the same. The Unlock of a hold that was lost or
// unlocked before uses no error up.
func (l *Locker) FailUnlock(errs ...error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unlockErrs = append(l.unlockErrs, errs...)
}

// next takes the first of errs that are left.
func next(errs *[]error) (err error) {
	if len(*errs) > 0 {
		err = (*errs)[0]
		*errs = (*errs)[1:]
	}
	return err
}

func (l *Locker) check(ctx context.Context) error {
	return cmp.Or(session.CheckContext(ctx), wire.CheckName(l.name, false))
}

func (l *Locker) acquire(ctx context.Context, o lock.Options, once bool) (lock.Hold, error) {
	if err := l.check(ctx); err != nil {
		return nil, l.object().Refused("acquire", err)
	}

	a := l.newAcquisition(ctx, o)
	began := time.Now()
	acquired, err := l.await(ctx, a, once)
	if err != nil {
		return nil, err
	}
	if !acquired {
		return nil, l.object().Failed(ctx, "acquire", began, lock.ErrNotAcquired)
	}

	return &engine.Handle{Droppable: a}, nil // unlike a handle of NewHandle, it is not released when it is dropped
}

// callersLocked returns the number of calls that wait.
func (l *Locker) callersLocked() (n int) {
	for _, a := range l.queue {
		if !a.elsewhere {
			n++
		}
	}
	return n
}

// await acquires the lock for a call, and reports whether it did. err is one of FailLock, or the error of
// MaxWaiters.
func (l *Locker) await(ctx context.Context, a *acquisition, once bool) (acquired bool, err error) {
	wait := ctx
	began := time.Now()
	if a.options.Bounded && !once {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(ctx, a.options.Wait)
		defer cancel()
	}
	l.mu.Lock()
	delay := l.delay
	l.mu.Unlock()
	if ctx.Err() != nil || !sleep(wait, delay) {
		return false, nil
	}

	l.enter()
	if err := next(&l.lockErrs); err != nil {
		l.mu.Unlock()
		return false, l.failed("acquire", err)
	}
	if l.claim != nil && !l.joins(a) {
		var err error
		if n := l.callersLocked(); a.options.MaxWaiters > 0 && n >= a.options.MaxWaiters {
			err = l.object().Failed(ctx, "acquire", began, engine.Crowded(n))
		}
		if once || err != nil {
			l.mu.Unlock()
			return false, err
		}
	}

	l.request(a)
	l.mu.Unlock()
	select {
	case <-a.granted:
	case <-wait.Done():
	}
	if ctx.Err() != nil {
		l.leave(a)
		return false, nil
	}

	l.enter()
	defer l.mu.Unlock()

	if l.unqueue(a) {
		return false, nil
	}
	if until := engine.KeptUntil(a.options); until.After(a.claim.keep) {
		a.claim.keep = until
	}
	return true, nil
}

// sleep blocks for d, and reports false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}

	timer := time.NewTimer(d)
	defer timer.Stop()

	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// claim is what has the lock: the holds of one owner. It is like the field of one on a server.
type claim struct {
	id    lock.Owner
	owner lock.Owner // that the callers named, or zero
	token int64
	holds []*acquisition // that are held
	keep  time.Time      // until when lock.AtLeast keeps it, or zero
	lease time.Time      // the end of the longest lease that an ended hold has left on the server
	until time.Time      // of a claim without holds: its end
}

// lastLease is how long a claim outlives a renewed hold at most.
const lastLease = redlatch.DefaultWatchdogTimeout

// clientID is the client in the ids of all Lockers, and claims is the number of their claims so far.
const clientID = "72656473-6c61-4463-8874-657374000000"

var claims atomic.Uint64

// enter locks the mutex, and ends what is over by now, even if its timer is late.
func (l *Locker) enter() {
	l.mu.Lock()
	c := l.claim
	now := time.Now()
	if c == nil {
		return
	}

	for _, a := range slices.Clone(c.holds) {
		if !a.ends.IsZero() && !now.Before(a.ends) {
			l.expire(a)
		}
	}

	if len(c.holds) == 0 && l.claim == c && !now.Before(c.until) {
		l.free()
	}
}

// tick is called by timers.
func (l *Locker) tick() {
	l.enter()
	l.mu.Unlock()
}

// expire ends a hold whose time is over. The mutex is held, also for what follows.
func (l *Locker) expire(a *acquisition) {
	reason := lock.ReasonExpired
	if a.options.MaxHold > 0 {
		reason = lock.ReasonMaxHold
	}
	a.lose(reason)
	if c := a.claim; a.drop() { // the work under it may not have noticed yet
		end := c.lease
		if c.keep.After(end) {
			end = c.keep
		}
		c.keepUntil(l, end)
	}
}

// keepUntil has a claim without holds end then.
func (c *claim) keepUntil(l *Locker, end time.Time) {
	c.until = end
	time.AfterFunc(time.Until(end), l.tick)
}

// loseAll ends the claim and all of its holds.
func (l *Locker) loseAll(reason lock.Reason) {
	for _, a := range slices.Clone(l.claim.holds) {
		a.lose(reason)
		a.drop()
	}
	l.free()
}

// request grants the lock to a, if that is possible now, or has a wait.
func (l *Locker) request(a *acquisition) {
	if l.claim == nil {
		l.grant(a)
	} else if l.joins(a) {
		a.begin(l.claim)
	} else {
		l.queue = append(l.queue, a)
	}
}

// joins reports whether a is by the owner that holds the lock.
func (l *Locker) joins(a *acquisition) bool {
	return !a.owner.IsZero() && a.owner == l.claim.owner && len(l.claim.holds) > 0
}

// grant gives the lock, which is free, to a, and to those that wait and have the same owner.
func (l *Locker) grant(a *acquisition) {
	id, _ := lock.NewOwner(clientID, claims.Add(1))
	l.token++
	l.claim = &claim{id: id, owner: a.owner, token: l.token}
	a.begin(l.claim)
	l.queue = slices.DeleteFunc(l.queue, func(other *acquisition) bool {
		joins := l.joins(other)
		if joins {
			other.begin(l.claim)
		}
		return joins
	})
}

// free ends the claim and grants the lock to the first waiter.
func (l *Locker) free() {
	l.claim = nil
	if len(l.queue) > 0 {
		first := l.queue[0]
		l.queue = slices.Delete(l.queue, 0, 1)
		l.grant(first)
	}
}

// unqueue removes a from the queue, and reports whether it was there.
func (l *Locker) unqueue(a *acquisition) bool {
	i := slices.Index(l.queue, a)
	if i >= 0 {
		l.queue = slices.Delete(l.queue, i, i+1)
	}
	return i >= 0
}

// leave ends a wait, or a hold that no caller has. It locks the mutex.
func (l *Locker) leave(a *acquisition) {
	l.enter()
	defer l.mu.Unlock()
	if !l.unqueue(a) {
		_ = l.end(a)
	}
}

// end ends a hold, and the claim with the last one.
func (l *Locker) end(a *acquisition) error {
	err := a.End("release", l.object())
	c := a.claim
	if c == nil { // it has left the queue before
		return err
	}
	last := err == nil && a.drop() || err != nil && len(c.holds) == 0
	switch {
	case !last || l.claim != c:
	case time.Now().Before(c.keep):
		c.keepUntil(l, c.keep)
	default:
		l.free()
	}

	return err
}

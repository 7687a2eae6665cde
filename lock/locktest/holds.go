package locktest

import (
	"context"
	"errors"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Do releases the lock however its function ends, and returns its error unchanged.
func (e *env) do() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	boom := errors.New("boom")
	e.must(l.Do(e.Context(), func(ctx context.Context) error {
		e.taken(e.rival(other, name))
		return ctx.Err()
	}))
	e.free(e.rival(other, name))
	if err := l.Do(e.Context(), func(context.Context) error { return boom }); err != boom {
		e.Fatalf("the error is changed: %v", err)
	}
	e.free(e.rival(other, name))

	func() {
		defer func() { e.isTrue(recover() == any("boom"), "the panic is another one") }()
		_ = l.Do(e.Context(), func(context.Context) error { panic("boom") })
	}()
	e.free(e.rival(other, name))
	var left sync.WaitGroup
	left.Go(func() { _ = l.Do(e.Context(), func(context.Context) error { runtime.Goexit(); return nil }) })
	left.Wait()
	e.free(e.rival(other, name))

	h := e.hold(e.Context(), e.rival(other, name))
	e.failed(l, "acquire", l.Do(e.Context(), nothing, lock.Wait(time.Millisecond)), nil, kinds...)
	e.unlock(h)

	err := l.Do(e.Context(), func(ctx context.Context) error {
		<-ctx.Done()
		return boom
	}, lock.MaxHold(100*time.Millisecond))
	var both *lock.DoError
	if !errors.As(err, &both) || both.Func != boom || !errors.Is(both.Unlock, lock.ErrLost) {
		e.Fatalf("the error does not tell of both: %v", err)
	}
	err = l.Do(e.Context(), func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}, lock.MaxHold(100*time.Millisecond))
	e.isTrue(errors.As(err, &both) && strings.Count(err.Error(), both.Unlock.Error()) == 1, "a loss is told twice: %v", err)
	e.becomesFree(e.rival(other, name), e.Settle)
}

// The context of a hold is a child of its parent, and ends before others have the lock.
func (e *env) context() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	type key struct{}
	parent, cancel := context.WithCancel(context.WithValue(e.Context(), key{}, "value"))
	defer cancel()

	h := e.hold(parent, l)
	e.isTrue(h.Context().Value(key{}) == "value", "the context has no parent")
	e.isTrue(h.Context() == h.Context(), "the context changes")
	e.must(h.Context().Err())
	e.unlock(h)
	e.isTrue(context.Cause(h.Context()) == context.Canceled, "the cause is %v", context.Cause(h.Context()))

	// The end of the parent ends the context and not the hold.
	h = e.hold(parent, l)
	cancel()
	e.is(h.Context().Err(), context.Canceled)
	e.isTrue(h.Remaining() > 0, "the hold has ended with its parent")
	e.taken(e.rival(other, name))
	e.must(h.Unlock(parent))
	e.free(e.rival(other, name))

	for range size(3, 20) {
		h := e.hold(e.Context(), l)
		w := e.start(e.Context(), e.rival(other, name))
		unlocked := make(chan error, 1)
		go func() { unlocked <- h.Unlock(e.Context()) }()
		next := w.got(e.Settle)
		e.is(h.Context().Err(), context.Canceled)
		e.must(<-unlocked)
		e.unlock(next)
	}
}

// With Parent the context of the call bounds the wait only, also that of a hold beside another one of its owner.
func (e *env) parent() {
	name := e.name("")
	c, other := e.client(), e.client()
	type key struct{}
	ended := errors.New("ended")
	check := func(ctx context.Context, before lock.Hold) {
		e.Helper()
		parent, endParent := context.WithCancelCause(context.WithValue(e.Context(), key{}, "value"))
		wait, endWait := context.WithCancel(ctx)
		w := e.start(wait, c.Lock(name), lock.Parent(parent))
		if before != nil {
			w.waits()
			e.unlock(before)
		}
		h := w.got(e.Settle)
		endWait()
		e.must(h.Context().Err())
		e.isTrue(h.Context().Value(key{}) == "value", "the context has another parent")
		endParent(ended)
		e.is(context.Cause(h.Context()), ended)
		e.must(h.Unlock(e.Context()))
	}

	check(e.Context(), nil)
	check(e.Context(), e.hold(e.Context(), e.rival(other, name)))
	if e.Reentrant {
		ctx := e.owner()
		first := e.hold(ctx, c.Lock(name))
		check(ctx, nil)
		e.unlock(first)
	}
}

// Bad input is an error of the call, and changes nothing.
func (e *env) input() {
	name := e.name("")
	c := e.client()
	var none context.Context
	h := e.hold(e.Context(), c.Lock(name))
	for _, bad := range []struct {
		l   lock.Locker
		ctx context.Context
	}{{c.Lock(""), e.Context()}, {c.Lock(name), none}} {
		_, err := bad.l.Lock(bad.ctx)
		e.failed(bad.l, "acquire", err, nil, lock.ErrInvalid)
		_, err = bad.l.TryLock(bad.ctx)
		e.failed(bad.l, "acquire", err, nil, lock.ErrInvalid)
		e.failed(bad.l, "acquire", bad.l.Do(bad.ctx, nothing), nil, lock.ErrInvalid)
	}

	l := c.Lock(name)
	for _, opts := range [][]lock.Option{
		{lock.Lease(0)}, {lock.Lease(-time.Second)}, {lock.Lease(time.Microsecond)}, {lock.Lease(math.MaxInt64)}, {lock.Lease(lock.NoExpiry)},
		{lock.Wait(-1)}, {lock.MaxHold(0)}, {lock.MaxHold(-1)}, {lock.MaxWaiters(0)}, {lock.AtLeast(-1)}, {lock.Parent(none)}, {nil},
		{lock.Lease(time.Second), lock.MaxHold(time.Second)}, {lock.Lease(time.Second), lock.AtLeast(time.Minute)},
	} {
		ctx, cancel := context.WithTimeout(e.Context(), soon)
		_, err := l.Lock(ctx, opts...)
		cancel()
		e.failed(l, "acquire", err, nil, lock.ErrInvalid)
	}
	_, err := l.TryLock(e.Context(), lock.MaxHold(-1))
	e.failed(l, "acquire", err, nil, lock.ErrInvalid)
	if !e.AtLeast {
		_, err := l.Lock(e.Context(), lock.AtLeast(time.Second))
		e.failed(l, "acquire", err, nil, lock.ErrInvalid)
	}
	e.failed(l, "acquire", l.Do(e.Context(), nil), nil, lock.ErrInvalid)

	e.failed(l, "release", h.Unlock(none), nil, lock.ErrInvalid)
	e.failed(l, "extend", h.Extend(none, time.Second), nil, lock.ErrInvalid)
	for _, lease := range []time.Duration{0, -1, math.MaxInt64} {
		e.failed(l, "extend", h.Extend(e.Context(), lease), nil, lock.ErrInvalid)
	}
	e.unlock(h)
}

// One Unlock ends a hold, also under a context that has ended.
func (e *env) unlocks() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	ended, cancel := context.WithCancel(e.Context())
	h := e.hold(ended, l)
	cancel()
	e.must(h.Unlock(ended))
	e.free(e.rival(other, name))
	next := e.hold(e.Context(), e.rival(other, name))
	for range 2 {
		e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrNotHeld)
		e.failed(l, "extend", h.Extend(e.Context(), time.Minute), nil, lock.ErrNotHeld)
	}
	e.isTrue(h.Remaining() == 0, "%v remain", h.Remaining())
	e.taken(l)
	e.unlock(next)

	for range size(3, 30) {
		h := e.hold(e.Context(), l)
		var unlocked atomic.Int32
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if err := h.Unlock(e.Context()); err == nil {
					unlocked.Add(1)
				} else if !errors.Is(err, lock.ErrNotHeld) {
					e.Error(err)
				}
			})
		}
		all.Wait()
		e.isTrue(unlocked.Load() == 1, "%d calls have unlocked it", unlocked.Load())
		e.free(e.rival(other, name))
	}
}

// A lock that cannot be adopted is not detached.
func (e *env) detach() {
	l := e.client().Lock(e.name(""))
	if _, can := l.(interface {
		Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error)
	}); can {
		return
	}
	h := e.hold(e.Context(), l)
	_, err := lock.Detach(e.Context(), h, time.Minute)
	e.failed(l, "detach", err, nil, lock.ErrUnsupported)
	e.unlock(h)
}

// Tokens grow from hold to hold, or there are none.
func (e *env) tokens() {
	name := e.name("")
	clients := []Client{e.client(), e.client()}
	last := int64(0)
	for i := range size(6, 40) {
		h := e.hold(e.Context(), e.rival(clients[i%2], name))
		token := h.Token()
		e.isTrue(token == h.Token(), "a token changes")
		e.isTrue(!e.Fenced && token == 0 || e.Fenced && token > last, "token %d follows %d", token, last)
		last = token
		e.unlock(h)
		e.isTrue(token == h.Token(), "a token changes")
	}
}

// Extend prolongs a lease, and never shortens it.
func (e *env) extend() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	lease := e.Settle + time.Second
	began := time.Now()
	h := e.hold(e.Context(), l, lock.Lease(lease))
	e.isTrue(h.Remaining() <= lease, "%v of %v remain", h.Remaining(), lease)
	e.must(h.Extend(e.Context(), 2*lease))
	e.must(h.Extend(e.Context(), time.Millisecond))
	left := h.Remaining()
	e.isTrue(left > lease-moment && left <= 2*lease, "%v of %v remain", left, 2*lease)
	time.Sleep(time.Until(began.Add(lease + lease/2)))
	e.must(context.Cause(h.Context()))
	e.taken(e.rival(other, name))
	e.lost(h, lease, lock.ReasonExpired)
	e.within(began, 2*lease-lease/10, 3*lease)
	e.failed(l, "extend", h.Extend(e.Context(), time.Minute), nil, lock.ErrLost)
	e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrLost)

	h = e.hold(e.Context(), l)
	e.must(h.Extend(e.Context(), lease))
	e.unlock(h)
	e.failed(l, "extend", h.Extend(e.Context(), lease), nil, lock.ErrNotHeld)
	e.becomesFree(e.rival(other, name), e.Settle)
}

// A lease ends a hold before others have the lock, and its late Unlock spares them.
func (e *env) lease() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	lease := e.Settle + moment
	for _, waiting := range []Client{c, other} {
		began := time.Now()
		h := e.hold(e.Context(), l, lock.Lease(lease))
		e.isTrue(h.Remaining() > 0 && h.Remaining() <= lease, "%v of %v remain", h.Remaining(), lease)
		next := e.start(e.Context(), e.rival(waiting, name)).got(lease + e.Settle)
		e.within(began, lease-lease/50, lease+e.Settle)
		e.lost(h, 0, lock.ReasonExpired)
		e.failed(l, "extend", h.Extend(e.Context(), time.Minute), nil, lock.ErrLost)
		e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrLost)
		e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrNotHeld)
		e.taken(e.rival(other, name))
		e.unlock(next)
	}

	// Whoever unlocks in time leaves nothing behind.
	e.unlock(e.hold(e.Context(), l, lock.Lease(time.Hour)))
	e.free(e.rival(other, name))
	e.unlock(e.hold(e.Context(), l, lock.Lease(lease)))
	next := e.hold(e.Context(), e.rival(other, name))
	time.Sleep(lease + e.Settle)
	e.taken(e.rival(c, name))
	e.unlock(next)
}

// MaxHold ends a hold, and leaves the lock to its Unlock.
func (e *env) maxHold() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	most := e.Settle + moment
	began := time.Now()
	h := e.hold(e.Context(), l, lock.MaxHold(most))
	e.isTrue(h.Remaining() <= most, "%v of %v remain", h.Remaining(), most)
	e.lost(h, most, lock.ReasonMaxHold)
	e.within(began, most-most/50, most)
	e.failed(l, "extend", h.Extend(e.Context(), time.Minute), nil, lock.ErrLost)
	w := e.start(e.Context(), e.rival(other, name))
	e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrLost)
	e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrNotHeld)
	e.unlock(w.got(e.Settle))

	// It concerns no hold that ends before.
	e.unlock(e.hold(e.Context(), l, lock.MaxHold(most)))
	next := e.hold(e.Context(), e.rival(other, name))
	time.Sleep(most)
	e.unlock(next)
}

// AtLeast keeps the lock after Unlock for its time and no longer.
func (e *env) atLeast() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	least := 2*e.Settle + moment
	began := time.Now()
	h := e.hold(e.Context(), l, lock.AtLeast(least))
	e.unlock(h)
	e.isTrue(h.Remaining() == 0, "%v remain", h.Remaining())
	e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrNotHeld)
	for _, of := range []Client{c, other} {
		e.taken(of.Lock(name))
	}
	h = e.start(e.Context(), other.Lock(name)).got(least + e.Settle)
	e.within(began, least-least/50, least+e.Settle)
	e.unlock(h)

	// Who holds it for longer is not concerned.
	h = e.hold(e.Context(), l, lock.AtLeast(time.Millisecond))
	time.Sleep(10 * time.Millisecond)
	e.unlock(h)
	e.free(other.Lock(name))
}

// An owner has as many holds as it has not unlocked, and nobody else gets in before the last ends.
func (e *env) reentry() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	ctx := e.owner()
	holds := []lock.Hold{e.hold(ctx, l)}
	w := e.start(e.Context(), e.rival(other, name))
	w.waits()
	second, err := c.Lock(name).TryLock(ctx)
	e.must(err)
	holds = append(holds, second, e.hold(ctx, l))
	e.isTrue(holds[0].Token() == second.Token(), "tokens %d and %d of one owner", holds[0].Token(), second.Token())
	e.taken(e.rival(c, name))
	if e.Closes { // otherwise the clients may be one
		_, err = e.rival(other, name).TryLock(ctx)
		e.failed(e.rival(other, name), "acquire", err, nil, lock.ErrNotAcquired)
	}
	for i, h := range holds {
		select {
		case <-w.done:
			e.Fatalf("another owner is inside: %v", w.err)
		default:
		}
		e.unlock(h)
		e.failed(l, "release", h.Unlock(ctx), nil, lock.ErrNotHeld)
		for _, later := range holds[i+1:] {
			e.must(later.Context().Err())
		}
	}
	e.unlock(w.got(e.Settle))

	unlocker, can := l.(interface {
		UnlockOwner(ctx context.Context) error
	})
	if !can {
		return
	}
	e.failed(l, "release", unlocker.UnlockOwner(e.Context()), nil, lock.ErrInvalid)
	e.failed(l, "release", unlocker.UnlockOwner(ctx), nil, lock.ErrNotHeld)
	first, last := e.hold(ctx, l), e.hold(ctx, l)
	e.failed(l, "release", unlocker.UnlockOwner(e.owner()), nil, lock.ErrNotHeld)
	e.must(unlocker.UnlockOwner(ctx))
	e.is(last.Context().Err(), context.Canceled)
	e.must(first.Context().Err())
	e.must(unlocker.UnlockOwner(ctx))
	e.failed(l, "release", unlocker.UnlockOwner(ctx), nil, lock.ErrNotHeld)
	e.free(e.rival(other, name))

	h := e.hold(ctx, l, lock.MaxHold(50*time.Millisecond))
	e.lost(h, 50*time.Millisecond, lock.ReasonMaxHold)
	e.failed(l, "release", unlocker.UnlockOwner(ctx), nil, lock.ErrLost)
	e.failed(l, "release", unlocker.UnlockOwner(ctx), nil, lock.ErrNotHeld)
	e.becomesFree(e.rival(other, name), e.Settle)
}

// When one goroutine of an owner gets the lock, the others do too.
func (e *env) ownerGoroutines() {
	name := e.name("")
	c, other := e.client(), e.client()
	for i, holder := range []Client{c, other, other} {
		leaves := i == 2
		ctx := e.owner()
		theirs := e.hold(e.Context(), e.rival(holder, name))
		first, cancel := context.WithCancel(ctx)
		all := []*call{e.start(first, c.Lock(name))}
		all[0].waits()
		for range 3 {
			all = append(all, e.start(ctx, c.Lock(name)))
		}
		all[3].waits()
		if leaves { // the others go on
			cancel()
			e.failed(c.Lock(name), "acquire", all[0].ends(e.Settle), context.Canceled, lock.ErrNotAcquired, lock.ErrIndeterminate)
			all = all[1:]
		}
		e.unlock(theirs)
		for _, w := range all {
			w.got(2 * e.Settle)
		}
		for _, w := range all {
			e.unlock(w.hold)
		}
		e.becomesFree(e.rival(other, name), e.Settle) // when the places of those that have joined are gone
		cancel()
	}
}

// The holds of an owner end each at its own time.
func (e *env) ownerLeases() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	lease := e.Settle + moment
	for _, first := range []bool{true, false} {
		ctx := e.owner()
		var short, long lock.Hold
		if first {
			short = e.hold(ctx, l, lock.Lease(lease))
			long = e.hold(ctx, l)
		} else {
			long = e.hold(ctx, l, lock.Lease(time.Hour))
			short = e.hold(ctx, l, lock.MaxHold(lease))
		}
		e.lost(short, lease, lock.ReasonExpired, lock.ReasonMaxHold)
		time.Sleep(e.Settle)
		e.taken(e.rival(other, name))
		e.failed(l, "release", short.Unlock(ctx), nil, lock.ErrLost)
		e.taken(e.rival(other, name))
		e.unlock(long)
		e.free(e.rival(other, name))
	}
}

// Readers share the lock, and a writer shares it with nobody.
func (e *env) sharing() {
	name := e.name("")
	c, other := e.client(), e.client()
	read, write := e.RWLock(c, name)
	otherRead, otherWrite := e.RWLock(other, name)
	readers := []lock.Hold{e.hold(e.Context(), read), e.hold(e.Context(), read), e.hold(e.Context(), otherRead)}
	e.takenBy(write, otherWrite)
	w := e.start(e.Context(), otherWrite)
	w.waits()
	for _, h := range readers {
		e.must(context.Cause(h.Context()))
		e.must(h.Unlock(e.Context()))
	}
	writer := w.got(e.Settle)
	e.takenBy(read, otherRead, write, otherWrite)
	waiting := []*call{e.start(e.Context(), read), e.start(e.Context(), otherRead)}
	waiting[1].waits()
	e.unlock(writer)
	both := []lock.Hold{waiting[0].got(e.Settle), waiting[1].got(e.Settle)}

	// A writer that has left is no obstacle.
	ctx, cancel := context.WithCancel(e.Context())
	w = e.start(ctx, write)
	w.waits()
	cancel()
	e.failed(write, "acquire", w.ends(e.Settle), context.Canceled, lock.ErrNotAcquired, lock.ErrIndeterminate)
	third := e.start(e.Context(), otherRead).got(2 * e.Settle)
	e.unlock(both[0], both[1], third)

	if e.Reentrant {
		ctx := e.owner()
		h := e.hold(ctx, read)
		_, err := write.Lock(ctx)
		e.failed(write, "acquire", err, nil, lock.ErrUpgrade)
		e.unlock(h)
		h = e.hold(ctx, write)
		inner := e.hold(ctx, read)
		e.unlock(inner, h)
	}
	e.free(otherWrite)
}

// takenBy is taken for several locks of any kind.
func (e *env) takenBy(locks ...lock.Locker) {
	e.Helper()
	for _, l := range locks {
		if h, err := l.TryLock(e.Context()); err == nil {
			_ = h.Unlock(e.Context())
			e.Fatalf("nobody holds %q", l.Name())
		} else if !errors.Is(err, lock.ErrNotAcquired) {
			e.Fatal(err)
		}
	}
}

// A semaphore has as many holds as permits, and is another one than the lock of that name.
func (e *env) permits() {
	name := e.name("")
	c, other := e.client(), e.client()
	const n = 3
	s, theirs := e.Semaphore(c, name, n), e.Semaphore(other, name, n)
	for _, permits := range []int{0, -1} {
		_, err := e.Semaphore(c, name, permits).TryLock(e.Context())
		e.is(err, lock.ErrInvalid)
	}
	locked := e.hold(e.Context(), c.Lock(name))
	ctx := e.owner() // who takes two of them
	holds := []lock.Hold{e.hold(ctx, s), e.hold(e.Context(), theirs), e.hold(ctx, s)}
	e.takenBy(s, theirs)
	waiting := []*call{e.start(e.Context(), s), e.start(e.Context(), theirs)}
	waiting[1].waits()
	e.unlock(holds[:2]...)
	e.unlock(waiting[0].got(e.Settle), waiting[1].got(e.Settle))
	e.unlock(holds[2], locked)

	var inside, most atomic.Int32
	var all sync.WaitGroup
	for i := range size(8, 24) {
		l := s
		if i%2 > 0 {
			l = theirs
		}
		all.Go(func() {
			for range size(3, 10) {
				err := l.Do(e.Context(), func(context.Context) error {
					now := inside.Add(1)
					for before := most.Load(); now > before && !most.CompareAndSwap(before, now); before = most.Load() {
					}
					time.Sleep(time.Millisecond)
					inside.Add(-1)
					return nil
				})
				if err != nil {
					e.Error(err)
				}
			}
		})
	}
	all.Wait()
	e.isTrue(most.Load() <= n, "%d of %d permits were held", most.Load(), n)
	for range n {
		holds = append(holds, e.hold(e.Context(), s))
	}
	e.unlock(holds[3:]...)
}

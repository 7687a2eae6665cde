package locktest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// alone is the weight of somebody beside whom nobody else is.
const alone = 1 << 16

// Many callers of many clients exclude each other, in whatever way they acquire the lock.
func (e *env) exclusion() {
	name := e.name("")
	var inside, entries atomic.Int32
	var guarded int        // by the lock alone
	var guards, last int64 // the same
	enter := func(h lock.Hold, rival bool) {
		me := int32(alone)
		if e.Rival != nil && !rival {
			me = 1
		} else {
			guarded++
			guards++
			if e.Fenced {
				if h.Token() <= last {
					e.Errorf("token %d follows %d", h.Token(), last)
				}
				last = h.Token()
			}
		}
		if now := inside.Add(me); me == alone && now != alone || now >= alone && me != alone {
			e.Errorf("somebody else is inside: %#x", now)
		}
		entries.Add(1)
		time.Sleep(rand.N(time.Millisecond))
		inside.Add(-me)
	}

	clients, callers, passes := size(2, 4), 4, size(5, 25)
	var done sync.WaitGroup
	for range clients {
		c := e.client()
		for n := range callers {
			l := c.Lock(name)
			rival := e.Rival != nil && n%2 == 0
			if rival {
				l = e.Rival(c, name)
			}
			done.Go(func() {
				for i := range passes {
					h, err := e.acquire(l, (n+i)%3)
					if err != nil {
						e.Errorf("a caller does not get in: %v", err)
						return
					}
					enter(h, rival)
					if err := h.Unlock(e.Context()); err != nil {
						e.Errorf("a caller does not get out: %v", err)
					}
				}
			})
		}
	}
	done.Wait()

	if got := int(entries.Load()); got != clients*callers*passes {
		e.Fatalf("%d of %d got in", got, clients*callers*passes)
	}
	e.isTrue(int64(guarded) == guards, "the lock guards nothing: %d, %d", guarded, guards)
	e.becomesFree(e.rival(e.client(), name), e.Settle)
}

// acquire acquires a lock in one of three ways.
func (e *env) acquire(l lock.Locker, way int) (lock.Hold, error) {
	for {
		var h lock.Hold
		var err error
		switch way {
		case 0:
			return l.Lock(e.Context())
		case 1:
			h, err = l.Lock(e.Context(), lock.Wait(rand.N(e.Settle)))
		case 2:
			if h, err = l.TryLock(e.Context()); err != nil {
				time.Sleep(rand.N(20 * time.Millisecond))
			}
		}
		if !slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) }) {
			return h, err
		}
	}
}

// An attempt that does not wait finds the lock taken, or takes it.
func (e *env) try() {
	name := e.name("")
	c, other := e.client(), e.client()
	for range 2 {
		h, err := c.Lock(name).TryLock(e.Context())
		e.must(err)
		e.must(h.Context().Err())
		e.isTrue(h.Name() == c.Lock(name).Name() && h.Remaining() > 0, "the hold of %q: %q, %v", name, h.Name(), h.Remaining())
		for _, l := range []lock.Locker{e.rival(c, name), e.rival(other, name)} {
			e.taken(l)
			_, err := l.Lock(e.Context(), lock.Wait(0))
			e.failed(l, "acquire", err, nil, lock.ErrNotAcquired)
		}
		e.unlock(h)
		e.free(e.rival(other, name))
	}
}

// A wait ends with its context and with lock.Wait.
func (e *env) wait() {
	name := e.name("")
	c, other := e.client(), e.client()
	h := e.hold(e.Context(), c.Lock(name))
	const wait = 200 * time.Millisecond
	boom := errors.New("boom")
	for _, l := range []lock.Locker{e.rival(c, name), e.rival(other, name)} {
		began := time.Now()
		_, err := l.Lock(e.Context(), lock.Wait(wait))
		e.failed(l, "acquire", err, nil, lock.ErrNotAcquired, lock.ErrIndeterminate)
		e.within(began, wait, wait+e.Settle)

		began = time.Now()
		ctx, cancel := context.WithTimeout(e.Context(), wait)
		_, err = l.Lock(ctx)
		cancel()
		e.failed(l, "acquire", err, context.DeadlineExceeded, lock.ErrNotAcquired, lock.ErrIndeterminate)
		e.within(began, wait, wait+e.Settle)

		ctx, end := context.WithCancelCause(e.Context())
		waiting := e.start(ctx, l)
		waiting.waits()
		end(boom)
		e.failed(l, "acquire", waiting.ends(e.Settle), boom, lock.ErrNotAcquired, lock.ErrIndeterminate)
		_, err = l.Lock(ctx)
		e.failed(l, "acquire", err, boom, lock.ErrNotAcquired)
		_, err = l.TryLock(ctx)
		e.failed(l, "acquire", err, boom, lock.ErrNotAcquired)
	}
	e.unlock(h)
	e.becomesFree(e.rival(other, name), e.Settle)
}

// A waiter gets what is released, and one after the other does.
func (e *env) handover() {
	name := e.name("")
	c, other := e.client(), e.client()
	for _, waiting := range []Client{c, other} {
		h := e.hold(e.Context(), c.Lock(name))
		w := e.start(e.Context(), e.rival(waiting, name), lock.Wait(time.Minute))
		w.waits()
		e.unlock(h)
		e.unlock(w.got(e.Settle))
	}

	h := e.hold(e.Context(), e.rival(c, name))
	var all []*call
	for range size(3, 8) {
		all = append(all, e.start(e.Context(), c.Lock(name)), e.start(e.Context(), other.Lock(name)))
	}
	all[len(all)-1].waits()
	e.unlock(h)
	var done sync.WaitGroup
	for _, w := range all {
		done.Go(func() {
			<-w.done
			if w.err != nil {
				e.Error(w.err)
				return
			}
			if err := w.hold.Unlock(e.Context()); err != nil {
				e.Error(err)
			}
		})
	}
	began := time.Now()
	done.Wait()
	e.within(began, 0, time.Duration(len(all))*e.Settle)
}

// Waiters of all clients get the lock in the order in which they came, but for those that have left.
func (e *env) order() {
	name := e.name("")
	clients := []Client{e.client(), e.client()}
	h := e.hold(e.Context(), clients[0].Lock(name))
	ctx, leave := context.WithCancel(e.Context())
	var all []*call
	for i := range size(5, 9) {
		of := e.Context()
		if i%3 == 1 {
			of = ctx
		}
		all = append(all, e.start(of, e.rival(clients[i%2], name)))
		all[i].waits()
	}
	leave()
	e.unlock(h)
	for i, w := range all {
		if i%3 == 1 {
			e.failed(e.rival(clients[i%2], name), "acquire", w.ends(e.Settle), context.Canceled, lock.ErrNotAcquired, lock.ErrIndeterminate)
			continue
		}
		h := w.got(2 * e.Settle)
		for _, later := range all[i+1:] {
			select {
			case <-later.done:
				e.isTrue(later.err != nil, "a later waiter has it too")
			default:
			}
		}
		e.unlock(h)
	}
}

// Whenever a call is cancelled, it returns at once, and leaves nothing that keeps the lock from others.
func (e *env) cancellation() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	boom := errors.New("boom")
	seed := rand.Uint64()
	e.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	var opts []lock.Option
	if e.AtLeast { // a caller that does not get the lock does not keep it
		opts = []lock.Option{lock.AtLeast(time.Hour)}
	}

	// held is what excludes l, released at the same time if released is set; nil if nothing does.
	leave := func(delay time.Duration, held lock.Hold, released bool) {
		ctx, cancel := context.WithCancelCause(e.Context())
		with := opts
		if held == nil || released {
			with = nil
		}
		began := time.Now()
		w := e.start(ctx, l, with...)
		time.Sleep(delay)
		cancel(boom)
		unlocked := make(chan error, 1)
		if released {
			go func() { unlocked <- held.Unlock(e.Context()) }()
		}
		err := w.ends(delay + e.Settle)
		e.within(began, 0, delay+e.Settle)
		if err == nil && (held == nil || released) {
			e.must(w.hold.Unlock(e.Context()))
		} else {
			e.failed(l, "acquire", err, boom, kinds...)
		}
		if released {
			e.must(<-unlocked)
		} else if held != nil {
			e.unlock(held)
		}
		e.becomesFree(e.rival(other, name), 2*e.Settle)
	}

	delays := []time.Duration{0}
	for d := 100 * time.Microsecond; d < e.Settle; d *= time.Duration(size(8, 3)) {
		delays = append(delays, d)
	}
	for range size(2, 8) {
		delays = append(delays, time.Duration(random.Int64N(int64(e.Settle))))
	}
	for _, delay := range delays {
		leave(delay, nil, false)
		for _, holder := range []Client{c, other} {
			leave(delay, e.hold(e.Context(), e.rival(holder, name)), false)
			leave(delay, e.hold(e.Context(), e.rival(holder, name)), true)
		}
	}

	// Nobody who stays notices that others leave.
	h := e.hold(e.Context(), e.rival(c, name))
	stays := e.start(e.Context(), e.rival(other, name))
	stays.waits()
	ctx, cancel := context.WithCancel(e.Context())
	var leavers []*call
	for range size(5, 50) {
		leavers = append(leavers, e.start(ctx, l))
	}
	last := e.start(e.Context(), e.rival(c, name))
	last.waits()
	cancel()
	for _, w := range leavers {
		e.failed(l, "acquire", w.ends(e.Settle), context.Canceled, kinds...)
	}
	e.unlock(h)
	select {
	case <-stays.done:
		e.unlock(stays.got(0))
		e.unlock(last.got(e.Settle))
	case <-last.done:
		e.unlock(last.got(0))
		e.unlock(stays.got(e.Settle))
	case <-time.After(e.Settle + slack):
		e.Fatal("nobody gets the lock")
	}
}

// MaxWaiters bounds the callers of one client that wait.
func (e *env) maxWaiters() {
	name := e.name("")
	c := e.client()
	h := e.hold(e.Context(), c.Lock(name))
	l := e.rival(c, name)
	ctx, cancel := context.WithCancel(e.Context())
	defer cancel()
	var waiting []*call
	for n := range 2 {
		waiting = append(waiting, e.start(ctx, l, lock.MaxWaiters(n+1)))
		waiting[n].waits()
		began := time.Now()
		_, err := l.Lock(e.Context(), lock.MaxWaiters(n+1))
		e.failed(l, "acquire", err, nil, lock.ErrNotAcquired)
		e.within(began, 0, e.Settle)
		e.isTrue(strings.Contains(err.Error(), "MaxWaiters"), "it does not say why: %v", err)
	}
	waiting = append(waiting, e.start(ctx, l)) // without a maximum
	waiting[2].waits()
	cancel()
	for _, w := range waiting {
		e.failed(l, "acquire", w.ends(e.Settle), context.Canceled, lock.ErrNotAcquired, lock.ErrIndeterminate)
	}
	w := e.start(e.Context(), l, lock.MaxWaiters(1))
	w.waits()
	e.unlock(h)
	e.unlock(w.got(e.Settle))
	e.unlock(e.hold(e.Context(), l, lock.MaxWaiters(1))) // nobody waits
}

// Locks with different names have nothing to do with each other, whatever is in the names.
func (e *env) differentNames() {
	c, other := e.client(), e.client()
	suffixes := []string{"", "/a", "/a/b", "/", " ", "A", "a", "ä", "ａ", ".", "..", "%", "%2F", "'", "\"", "\\", "-0000000001", ":1", "\x01", "🔒", "-" + strings.Repeat("x", 100)}
	var holds []lock.Hold
	for _, suffix := range suffixes {
		name := e.name(suffix)
		h, err := c.Lock(name).TryLock(e.Context())
		if errors.Is(err, lock.ErrInvalid) {
			e.Logf("the store does not have %q: %v", name, err)
			e.used = slices.DeleteFunc(e.used, func(used string) bool { return used == name })
			continue
		}
		e.must(err)
		e.taken(e.rival(other, name))
		holds = append(holds, h)
	}
	e.isTrue(len(holds) > 5, "only %d names are valid", len(holds))
	for _, h := range holds {
		e.unlock(h)
	}
	for _, name := range e.used {
		e.free(e.rival(other, name))
	}

	// Nor do many.
	var many sync.WaitGroup
	for n := range size(20, 200) {
		name := e.name(fmt.Sprintf("-many-%d", n))
		many.Go(func() {
			if err := c.Lock(name).Do(e.Context(), nothing); err != nil {
				e.Error(err)
			}
		})
	}
	many.Wait()
}

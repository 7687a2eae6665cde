package locktest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// A client that is closed ends its waits and holds, and leaves nothing that keeps others waiting.
func (e *env) closing() {
	name := e.name("")
	other := e.client()
	theirs := e.hold(e.Context(), e.rival(other, name))
	c := e.client()
	l := c.Lock(name)
	var waiting []*call
	for range 3 {
		waiting = append(waiting, e.start(e.Context(), l))
	}
	waiting[2].waits()
	held := e.name("-held")
	h := e.hold(e.Context(), c.Lock(held))
	began := time.Now()
	c.Close()
	e.within(began, 0, soon)
	for _, w := range waiting {
		err := w.ends(0)
		e.failed(l, "acquire", err, nil, lock.ErrClosed)
		e.isTrue(!errors.Is(err, lock.ErrNotAcquired), "others have nothing to do with it: %v", err)
	}
	e.lost(h, 0, lock.ReasonClosed)
	e.is(context.Cause(h.Context()), lock.ErrClosed)
	e.failed(c.Lock(held), "release", h.Unlock(e.Context()), nil, lock.ErrLost)
	for range 2 {
		_, err := l.Lock(e.Context())
		e.failed(l, "acquire", err, nil, lock.ErrClosed)
		_, err = c.Lock(e.name("-new")).TryLock(e.Context())
		e.is(err, lock.ErrClosed)
		c.Close()
	}

	e.must(context.Cause(theirs.Context()))
	e.unlock(theirs)
	e.becomesFree(e.rival(other, name), e.Settle)
	e.becomesFree(e.rival(other, held), e.Expiry+e.Settle)
}

// A lock that was opened by hand is free for all, also for the client that had it, whose hold is lost.
func (e *env) opened() {
	c, other := e.client(), e.client()
	gone := []error{lock.ErrLost, lock.ErrIndeterminate} // the session may end under the request
	leases := [][]lock.Option{nil}
	if e.Leased {
		leases = append(leases, []lock.Option{lock.Lease(time.Hour)})
	}

	for i, opts := range leases {
		for _, extends := range []bool{false, e.Extends} {
			name := e.name(fmt.Sprintf("-%d-%v", i, extends))
			l := c.Lock(name)
			h := e.hold(e.Context(), l, opts...)
			e.Open(e.T, name)
			if extends {
				e.failed(l, "extend", h.Extend(e.Context(), time.Hour), nil, gone...)
				e.lost(h, e.Settle, lock.ReasonGone)
			}
			e.failed(l, "release", h.Unlock(e.Context()), nil, gone...)
			e.becomesFree(l, e.Settle)
			e.becomesFree(e.rival(other, name), e.Settle)
		}
	}
}

// The hold of a client that is cut off ends before others have the lock, and leaves nothing.
func (e *env) cutOff() {
	name := e.name("")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	h := e.hold(e.Context(), l)
	waiting := e.start(e.Context(), e.rival(other, name))
	waiting.waits()
	restore := e.CutOff(e.T, c)

	if e.Expires {
		next := waiting.got(e.Expiry + e.Settle)
		if h.Remaining() > 0 { // its context ends soon: the process may pause for a moment
			e.Fatal("two hold the lock")
		}
		e.lost(h, 0, lock.ReasonExpired, lock.ReasonGone)
		restore()
		e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrLost)
		time.Sleep(2 * e.Settle)
		e.taken(e.rival(other, name))
		e.unlock(next)
	} else {
		e.lost(h, e.Expiry, lock.ReasonExpired, lock.ReasonGone)
		restore()
		e.failed(l, "release", h.Unlock(e.Context()), nil, lock.ErrLost)
		e.unlock(waiting.got(e.Expiry + e.Settle))
	}

	// The client goes on.
	e.becomesFree(l, e.Expiry+soon)
	e.becomesFree(e.rival(other, name), e.Settle)
}

// Calls of a client that is cut off end in time, or when it is not cut off any more.
func (e *env) cutOffCalls() {
	name := e.name("")
	held := e.name("-held")
	c, other := e.client(), e.client()
	l := c.Lock(name)
	h := e.hold(e.Context(), c.Lock(held))
	restore := e.CutOff(e.T, c)
	waits := e.start(e.Context(), l)

	const wait = 200 * time.Millisecond
	away := []error{lock.ErrUnavailable, lock.ErrIndeterminate}
	began := time.Now()
	_, err := l.Lock(e.Context(), lock.Wait(wait))
	e.failed(l, "acquire", err, nil, kinds...) // it may wait behind the other call
	e.within(began, 0, wait+e.Settle)
	boom := errors.New("boom")
	ctx, cancel := context.WithTimeoutCause(e.Context(), wait, boom)
	_, err = l.Lock(ctx)
	cancel()
	e.failed(l, "acquire", err, boom, kinds...)
	for _, call := range []func(ctx context.Context) error{
		func(ctx context.Context) error { _, err := l.TryLock(ctx); return err },
		func(ctx context.Context) error { _, err := l.Lock(ctx, lock.FailFast()); return err },
		func(ctx context.Context) error { return h.Extend(ctx, time.Minute) },
	} {
		ctx, cancel := context.WithTimeout(e.Context(), wait)
		began := time.Now()
		err := call(ctx)
		cancel()
		e.within(began, 0, wait+e.Settle)
		e.isTrue(err != nil, "a call succeeds without the store")
		matches := func(target error) bool { return errors.Is(err, target) }
		e.isTrue(slices.ContainsFunc(append(kinds, lock.ErrLost, lock.ErrUnsupported), matches), "the error has no kind: %v", err)
	}

	began = time.Now()
	_, err = l.TryLock(e.Context())
	e.failed(l, "acquire", err, nil, kinds...)
	e.within(began, 0, soon)

	const unlockTimeout = 5 * time.Second
	began = time.Now()
	e.failed(c.Lock(held), "release", h.Unlock(e.Context()), nil, append(away, lock.ErrLost)...)
	e.within(began, 0, unlockTimeout)
	select {
	case <-waits.done:
		e.Fatalf("a call does not wait for the store: %v", waits.err)
	default:
	}
	restore()
	e.unlock(waits.got(e.Expiry + soon))
	e.becomesFree(e.rival(other, name), e.Expiry+e.Settle)
	e.becomesFree(e.rival(other, held), e.Expiry+e.Settle)
}

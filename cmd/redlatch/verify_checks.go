package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// verifyChecks are the checks, in the order of the table.
var verifyChecks = []struct {
	name string
	run  func(t *trial) error
}{
	{"lock", (*trial).lock},
	{"fenced lock", (*trial).fenced},
	{"spin lock", (*trial).spin},
	{"plain lock", (*trial).plain},
	{"fair lock", (*trial).fair},
	{"read-write lock", (*trial).readWrite},
	{"group lock", (*trial).group},
	{"semaphore", (*trial).semaphore},
	{"permit semaphore", (*trial).permits},
	{"rate limiter", (*trial).rate},
	{"latch", (*trial).latch},
	{"election", (*trial).election},
	{"once-only work", (*trial).once},
	{"MultiLock", (*trial).multi},
	{"hash tags", (*trial).hashTags},
	{"renewal", (*trial).renewal},
	{"polling", (*trial).polling},
	{"reconnection", (*trial).reconnection},
	{"clock", (*trial).clock},
	{"eviction", (*trial).eviction},
}

// trial is a check that runs.
type trial struct {
	*verifier
	ctx  context.Context
	name string // of the check's object; other objects have a colon and more after it

	mu      sync.Mutex
	polls   string // why waiters poll
	warning string
	skipped string // why the check is impossible
	detail  string
}

// note sets a field of t: a check that hangs may do so after its verdict.
func (t *trial) note(field *string, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	*field = text
}

// all runs all checks concurrently.
func (v *verifier) all(ctx context.Context) []verdict {
	verdicts := make([]verdict, len(verifyChecks))
	var wg sync.WaitGroup
	for i, c := range verifyChecks {
		wg.Go(func() {
			began := time.Now()
			verdicts[i] = v.one(ctx, c.name, c.run)
			verdicts[i].Seconds = time.Since(began).Seconds()
		})
	}
	wg.Wait()
	return verdicts
}

// one runs a check. It returns although the check hangs.
func (v *verifier) one(ctx context.Context, name string, run func(t *trial) error) verdict {
	t := &trial{verifier: v, ctx: ctx, name: v.scratch + ":" + strings.ReplaceAll(name, " ", "-")}
	result := make(chan error, 1)
	v.done.Go(func() { result <- run(t) })
	var err error
	select {
	case err = <-result:
	case <-ctx.Done():
		select {
		case err = <-result:
		case <-time.After(releaseTime):
			err = errors.New("it hangs")
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.skipped != "":
		return verdict{Check: name, Result: resultUnchecked, Detail: t.skipped}
	case err != nil && !time.Now().Before(v.end):
		// What does not work fails earlier. A server that is far away, or silent, is slow.
		return verdict{Check: name, Result: resultUnchecked, Detail: "no time was left: " + v.text(err), late: true}
	case err != nil:
		return verdict{Check: name, Result: resultFails, Detail: v.text(err)}
	case t.warning != "":
		return verdict{Check: name, Result: resultWarning, Detail: t.warning}
	case t.polls != "":
		return verdict{Check: name, Result: resultPolls, Detail: t.polls}
	}
	return verdict{Check: name, Result: resultWorks, Detail: t.detail}
}

// text returns a line for the table. The random names in an error say nothing.
func (v *verifier) text(err error) string {
	return strings.ReplaceAll(strings.ReplaceAll(message(err), v.scratch+":", ""), "\n", "; ")
}

// steps runs the parts of a check, each with a name for its errors.
func (t *trial) steps(parts ...step) error {
	for _, p := range parts {
		if err := p.run(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

type step struct {
	name string
	run  func() error
}

// locks returns the lock of the check as a client sees it.
type locks func(c *redlatch.Client) lock.Locker

// free checks that nobody holds a lock.
func (t *trial) free(l lock.Locker) error {
	h, err := l.TryLock(t.ctx)
	if err != nil {
		return fmt.Errorf("after the release: %w", err)
	}
	return h.Unlock(t.ctx)
}

var errBoth = errors.New("two clients held it at once")

// taken checks that another client cannot have a lock.
func (t *trial) taken(l lock.Locker) error {
	h, err := l.TryLock(t.ctx)
	switch {
	case err == nil:
		return errors.Join(errBoth, h.Unlock(t.ctx))
	case errors.Is(err, lock.ErrNotAcquired):
		return nil
	}
	return err
}

// exclusion checks that only one client has the lock, and that another one gets it afterwards.
func (t *trial) exclusion(of locks) step {
	return step{"exclusion", func() error {
		h, err := of(t.holder).TryLock(t.ctx)
		if err != nil {
			return err
		}
		return cmpErr(t.taken(of(t.other)), h.Unlock(t.ctx), func() error { return t.free(of(t.other)) })
	}}
}

// cmpErr returns the first error, or that of f.
func cmpErr(first, second error, f func() error) error {
	if first != nil {
		return first
	}
	if second != nil {
		return second
	}
	return f()
}

// reentry checks that an owner can hold the lock twice.
func (t *trial) reentry(of locks) step {
	return step{"re-entry", func() error {
		ctx := lock.WithOwner(t.ctx, t.holder.NewOwner())
		outer, err := of(t.holder).TryLock(ctx)
		if err != nil {
			return err
		}
		inner, err := of(t.holder).TryLock(ctx)
		if err != nil {
			return errors.Join(err, outer.Unlock(t.ctx))
		}
		return cmpErr(inner.Unlock(t.ctx), t.taken(of(t.other)), func() error {
			return cmpErr(outer.Unlock(t.ctx), nil, func() error { return t.free(of(t.other)) })
		})
	}}
}

// noReentry checks that an owner cannot hold the lock twice.
func (t *trial) noReentry(of locks) step {
	return step{"re-entry", func() error {
		ctx := lock.WithOwner(t.ctx, t.holder.NewOwner())
		h, err := of(t.holder).TryLock(ctx)
		if err != nil {
			return err
		}
		if again, err := of(t.holder).TryLock(ctx); !errors.Is(err, lock.ErrReentered) {
			if err == nil {
				err = errors.Join(errors.New("its owner got it twice"), again.Unlock(t.ctx))
			}
			return errors.Join(err, h.Unlock(t.ctx))
		}
		return h.Unlock(t.ctx)
	}}
}

// expiry checks that the lock becomes free when its lease ends, and that its holder notices.
func (t *trial) expiry(held, wanted locks) step {
	return step{"expiry", func() error {
		lease := t.shortLease()
		sent := time.Now()
		h, err := held(t.holder).TryLock(t.ctx, lock.Lease(lease))
		if err != nil {
			return err
		}
		next, err := wanted(t.other).Lock(t.ctx)
		if err != nil {
			return err
		}
		return errors.Join(t.inTime("lease", lease, time.Since(sent)), next.Unlock(t.ctx), noticed(h.Context()))
	}}
}

// noticed checks that the context of a hold whose lease is over has ended, or does so at once.
func noticed(hold context.Context) error {
	select {
	case <-hold.Done():
		return nil
	case <-time.After(time.Second):
		return errors.New("its holder has not noticed it")
	}
}

// inTime checks when something with a lease, or another time that it has, became free.
func (t *trial) inTime(what string, lease, took time.Duration) error {
	switch late := t.within(2*time.Second, 10); {
	// The server counts from later on, but clocks differ by a little.
	case took < lease-lease/100-5*time.Millisecond:
		return fmt.Errorf("another client got it after %v, before its %s of %v was over", round(took), what, round(lease))
	case took > lease+late:
		return fmt.Errorf("another client got it after %v, later than its %s of %v and %v", round(took), what, round(lease), round(late))
	}
	return nil
}

func round(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// waiting checks that a waiter gets the lock after its release.
func (t *trial) waiting(held, wanted locks) step {
	return step{"waiting", func() error {
		return t.handOver(
			func() (func() error, error) {
				h, err := held(t.holder).TryLock(t.ctx)
				if err != nil {
					return nil, err
				}
				return func() error { return h.Unlock(t.ctx) }, nil
			},
			func(c *redlatch.Client) error {
				h, err := wanted(c).Lock(t.ctx)
				if err != nil {
					return err
				}
				return h.Unlock(t.ctx)
			})
	}}
}

// handOver checks that wait ends after the release that hold returns, and whether a message wakes it.
func (t *trial) handOver(hold func() (release func() error, err error), wait func(c *redlatch.Client) error) error {
	var w *waiter
	select {
	case w = <-t.waiters:
	case <-t.ctx.Done():
		return context.Cause(t.ctx)
	}
	ended, err := t.overhear(w, hold, wait)
	t.waiters <- w // while its call may still wait: the next check waits for messages of its own
	if err != nil {
		return err
	}
	return t.await(ended)
}

// overhear is handOver until it is known whether a message came. It returns the result of wait.
func (t *trial) overhear(w *waiter, hold func() (func() error, error), wait func(*redlatch.Client) error) (<-chan error, error) {
	release, err := hold()
	if err != nil {
		return nil, err
	}
	ended := t.background(func() error { return wait(w.client) })
	if err := t.parked(w.client, ended); err != nil {
		return nil, errors.Join(err, release())
	}
	return ended, t.heard(w, release)
}

// heard releases the object, and notes if no message comes.
func (t *trial) heard(w *waiter, release func() error) error {
	before := w.client.Stats().PubSub.Messages
	if err := release(); err != nil {
		return err
	}
	bound := t.within(time.Second, 5)
	for released := time.Now(); w.client.Stats().PubSub.Messages == before; time.Sleep(time.Millisecond) {
		if time.Since(released) > bound {
			polls := fmt.Sprintf("no message came within %v", bound.Round(100*time.Millisecond))
			if refusal := w.log.lastRefusal(); refusal != "" {
				polls += ": " + refusal
			}
			t.note(&t.polls, polls)
			break
		}
	}
	return nil
}

// background runs f in another goroutine, which the cleanup awaits.
func (t *trial) background(f func() error) <-chan error {
	result := make(chan error, 1)
	t.done.Go(func() { result <- f() })
	return result
}

// await returns the result of a waiter after a release.
func (t *trial) await(ended <-chan error) error {
	late := t.within(7*time.Second, 10) // a poll takes 5 s
	select {
	case err := <-ended:
		return err
	case <-time.After(late):
		return fmt.Errorf("a waiter did not get it within %v of the release", round(late))
	case <-t.ctx.Done():
		return context.Cause(t.ctx)
	}
}

// parked waits until a call of the client waits for the object, and has had the time to subscribe.
func (t *trial) parked(c *redlatch.Client, ended <-chan error) error {
	began, quiet := time.Now(), time.Time{}
	for ; t.ctx.Err() == nil; time.Sleep(2 * time.Millisecond) {
		select {
		case err := <-ended:
			if err == nil {
				err = errBoth
			}
			return err
		default:
		}
		waits := slices.ContainsFunc(c.Holds(), func(h redlatch.HoldInfo) bool {
			return h.Waiting && (h.Name == t.name || strings.HasPrefix(h.Name, t.name+":"))
		})
		// A channel whose subscription is refused never counts, so the wait for the others is bounded.
		now, hub := time.Now(), c.Stats().PubSub
		subscribed := hub.Subscribed >= max(hub.Channels, 1) || now.Sub(began) > t.within(2*time.Second, 10)
		switch limit := t.within(5*time.Second, 20); {
		case !waits && now.Sub(began) > limit:
			return fmt.Errorf("a client neither got it nor waited for it within %v", round(limit))
		case !waits || !subscribed:
			quiet = time.Time{}
		case quiet.IsZero():
			quiet = now
		case now.Sub(quiet) > t.within(20*time.Millisecond, 2):
			return nil // the attempt after the subscription is over too
		}
	}
	return context.Cause(t.ctx)
}

// standard are the steps for an exclusive lock.
func (t *trial) standard(of locks) []step {
	return []step{t.exclusion(of), t.waiting(of, of), t.expiry(of, of), t.reentry(of)}
}

func (t *trial) lock() error {
	return t.steps(t.standard(func(c *redlatch.Client) lock.Locker { return c.Lock(t.name) })...)
}

func (t *trial) fenced() error {
	of := func(c *redlatch.Client) lock.Locker { return c.FencedLock(t.name) }
	return t.steps(append(t.standard(of), step{"tokens", func() error {
		last := int64(0)
		for _, c := range []*redlatch.Client{t.holder, t.other, t.holder} {
			h, err := of(c).TryLock(t.ctx)
			if err != nil {
				return err
			}
			if err := h.Unlock(t.ctx); err != nil {
				return err
			}
			if h.Token() <= last {
				return fmt.Errorf("token %d follows %d", h.Token(), last)
			}
			last = h.Token()
		}
		return nil
	}})...)
}

func (t *trial) spin() error {
	of := func(c *redlatch.Client) lock.Locker { return c.SpinLock(t.name) }
	return t.steps(t.exclusion(of), t.unheard(t.other, of), t.expiry(of, of), t.reentry(of))
}

func (t *trial) plain() error {
	of := func(c *redlatch.Client) lock.Locker { return c.PlainLock(t.name) }
	return t.steps(t.exclusion(of), t.waiting(of, of), t.expiry(of, of), t.noReentry(of))
}

// unheard checks that a waiter that gets no messages gets the lock.
func (t *trial) unheard(waiter *redlatch.Client, of locks) step {
	return step{"waiting", func() error {
		h, err := of(t.holder).TryLock(t.ctx)
		if err != nil {
			return err
		}
		ended := t.background(func() error {
			h, err := of(waiter).Lock(t.ctx)
			if err != nil {
				return err
			}
			return h.Unlock(t.ctx)
		})
		select {
		case err := <-ended:
			if err == nil {
				err = errBoth
			}
			return errors.Join(err, h.Unlock(t.ctx))
		case <-time.After(t.within(100*time.Millisecond, 5)):
		}
		if err := h.Unlock(t.ctx); err != nil {
			return err
		}
		return t.await(ended)
	}}
}

func (t *trial) polling() error {
	return t.steps(t.unheard(t.deaf, func(c *redlatch.Client) lock.Locker { return c.Lock(t.name) }))
}

func (t *trial) fair() error {
	of := func(c *redlatch.Client) lock.Locker { return c.FairLock(t.name) }
	return t.steps(append(t.standard(of), step{"order", t.order})...)
}

// order checks that waiters of two clients get a fair lock in the order in which they came.
func (t *trial) order() error {
	name := t.name + ":order"
	h, err := t.holder.FairLock(name).TryLock(t.ctx)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var got []int
	var waiters []<-chan error
	for i, c := range []*redlatch.Client{t.other, t.holder, t.other} {
		waiters = append(waiters, t.background(func() error {
			h, err := c.FairLock(name).Lock(t.ctx)
			if err != nil {
				return err
			}
			mu.Lock()
			got = append(got, i+1)
			mu.Unlock()
			return h.Unlock(t.ctx)
		}))
		if err := t.queued(t.holder.FairLock(name), i+1); err != nil {
			return errors.Join(err, h.Unlock(t.ctx))
		}
	}
	if err := h.Unlock(t.ctx); err != nil {
		return err
	}
	for _, w := range waiters {
		if err := t.await(w); err != nil {
			return err
		}
	}
	if !slices.IsSorted(got) {
		return fmt.Errorf("the waiters got it in the order %v", got)
	}
	return nil
}

// queued waits until n waiters are in the queue.
func (t *trial) queued(l *fairlock.Lock, n int) error {
	for {
		queue, err := l.Queue(t.ctx)
		if err != nil || len(queue) == n {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-t.ctx.Done():
			return fmt.Errorf("%d of %d waiters are in the queue: %w", len(queue), n, context.Cause(t.ctx))
		}
	}
}

func (t *trial) readWrite() error {
	read := func(c *redlatch.Client) lock.Locker { return c.RWLock(t.name).Read() }
	write := func(c *redlatch.Client) lock.Locker { return c.RWLock(t.name).Write() }
	return t.steps(
		t.exclusion(write),
		step{"readers", func() error {
			one, err := read(t.holder).TryLock(t.ctx)
			if err != nil {
				return err
			}
			two, err := read(t.other).TryLock(t.ctx)
			if err != nil {
				return errors.Join(fmt.Errorf("a second reader: %w", err), one.Unlock(t.ctx))
			}
			return cmpErr(t.taken(write(t.other)), errors.Join(one.Unlock(t.ctx), two.Unlock(t.ctx)), func() error {
				return t.free(write(t.other))
			})
		}},
		t.waiting(write, read), t.waiting(read, write), t.expiry(write, read), t.expiry(read, write), t.reentry(write),
	)
}

func (t *trial) group() error {
	of := func(values ...string) locks {
		return func(c *redlatch.Client) lock.Locker { return c.GroupLock(t.name, values...) }
	}
	some, others := of("a", "b"), of("c", "b")
	return t.steps(
		t.exclusion(some),
		step{"values", func() error {
			one, err := some(t.holder).TryLock(t.ctx)
			if err != nil {
				return err
			}
			two, err := of("c")(t.other).TryLock(t.ctx)
			if err != nil {
				return errors.Join(fmt.Errorf("another value: %w", err), one.Unlock(t.ctx))
			}
			return errors.Join(two.Unlock(t.ctx), t.taken(others(t.other)), one.Unlock(t.ctx), t.free(others(t.other)))
		}},
		t.waiting(some, others), t.expiry(some, others), t.reentry(some),
	)
}

// refused checks that an acquisition beyond what there is has failed.
func refused(err error, beyond string) error {
	if err == nil {
		return errors.New(beyond + " were acquired")
	}
	if errors.Is(err, lock.ErrNotAcquired) {
		return nil
	}
	return err
}

func (t *trial) semaphore() error {
	of := func(c *redlatch.Client) *semaphore.Semaphore { return c.Semaphore(t.name, semaphore.Permits(2)) }
	take := func() (func() error, error) {
		if err := of(t.holder).TryAcquire(t.ctx, 2); err != nil {
			return nil, err
		}
		return func() error { return of(t.holder).Release(t.ctx, 2) }, nil
	}
	return t.steps(
		step{"permits", func() error {
			release, err := take()
			if err != nil {
				return err
			}
			if err := refused(of(t.other).TryAcquire(t.ctx, 1), "3 of 2 permits"); err != nil {
				return err
			}
			if err := release(); err != nil {
				return err
			}
			if err := of(t.other).TryAcquire(t.ctx, 2); err != nil {
				return fmt.Errorf("after the release: %w", err)
			}
			return of(t.other).Release(t.ctx, 2)
		}},
		step{"waiting", func() error {
			return t.handOver(take, func(c *redlatch.Client) error {
				if err := of(c).Acquire(t.ctx, 1); err != nil {
					return err
				}
				return of(c).Release(t.ctx, 1)
			})
		}},
	)
}

func (t *trial) permits() error {
	of := func(c *redlatch.Client) *semaphore.PermitSemaphore {
		return c.PermitSemaphore(t.name, semaphore.Permits(1))
	}
	take := func() (func() error, error) {
		p, err := of(t.holder).TryAcquire(t.ctx, 1)
		if err != nil {
			return nil, err
		}
		return func() error { return p.Release(t.ctx) }, nil
	}
	wait := func(c *redlatch.Client) error {
		p, err := of(c).Acquire(t.ctx, 1)
		if err != nil {
			return err
		}
		return p.Release(t.ctx)
	}
	return t.steps(
		step{"permits", func() error {
			release, err := take()
			if err != nil {
				return err
			}
			if p, err := of(t.other).TryAcquire(t.ctx, 1); !errors.Is(err, lock.ErrNotAcquired) {
				if err == nil {
					err = errors.Join(errors.New("2 of 1 permits were acquired"), p.Release(t.ctx))
				}
				return err
			}
			return release()
		}},
		step{"waiting", func() error { return t.handOver(take, wait) }},
		step{"expiry", func() error {
			lease, sent := t.shortLease(), time.Now()
			p, err := of(t.holder).TryAcquire(t.ctx, 1, lock.Lease(lease))
			if err != nil {
				return err
			}
			if err := wait(t.other); err != nil {
				return err
			}
			return errors.Join(t.inTime("lease", lease, time.Since(sent)), noticed(p.Context()))
		}},
	)
}

func (t *trial) rate() error {
	of := func(c *redlatch.Client) *ratelimit.Limiter {
		return c.RateLimiter(t.name, ratelimit.Rate(2, time.Hour))
	}
	take := func() (func() error, error) {
		if err := of(t.holder).TryAcquire(t.ctx, 2); err != nil {
			return nil, err
		}
		return func() error { _, err := of(t.holder).Release(t.ctx, 2); return err }, nil
	}
	return t.steps(
		step{"permits", func() error {
			release, err := take()
			if err != nil {
				return err
			}
			if err := refused(of(t.other).TryAcquire(t.ctx, 1), "3 permits of a rate of 2"); err != nil {
				return err
			}
			return release()
		}},
		step{"waiting", func() error {
			return t.handOver(take, func(c *redlatch.Client) error { return of(c).Acquire(t.ctx, 1) })
		}},
		step{"window", func() error { return t.window(t.name + ":window") }},
	)
}

// window checks that a permit comes back after the interval, and not before.
func (t *trial) window(name string) error {
	per := t.shortLease()
	of := func(c *redlatch.Client) *ratelimit.Limiter { return c.RateLimiter(name, ratelimit.Rate(1, per)) }
	sent := time.Now()
	if err := of(t.holder).TryAcquire(t.ctx, 1); err != nil {
		return err
	}
	if err := of(t.other).Acquire(t.ctx, 1); err != nil {
		return err
	}
	return t.inTime("interval", per, time.Since(sent))
}

func (t *trial) latch() error {
	latch := t.holder.CountDownLatch(t.name)
	set := func() (func() error, error) {
		if done, err := latch.TrySetCount(t.ctx, 2); err != nil || !done {
			return nil, cmpErr(err, nil, func() error { return errors.New("the count cannot be set") })
		}
		return func() error {
			for _, c := range []*redlatch.Client{t.other, t.holder} {
				if _, err := c.CountDownLatch(t.name).CountDown(t.ctx); err != nil {
					return err
				}
			}
			return nil
		}, nil
	}
	wait := func(c *redlatch.Client) error { return c.CountDownLatch(t.name).Wait(t.ctx) }
	err := t.steps(
		step{"counting", func() error {
			down, err := set()
			if err != nil {
				return err
			}
			switch n, err := t.other.CountDownLatch(t.name).Count(t.ctx); {
			case err != nil:
				return err
			case n != 2:
				return fmt.Errorf("the count is %d instead of 2", n)
			}
			if err := down(); err != nil {
				return err
			}
			return wait(t.other)
		}},
		step{"waiting", func() error { return t.handOver(set, wait) }},
		step{"expiry", func() error {
			life, sent := t.shortLease(), time.Now()
			if _, err := latch.TrySetCountFor(t.ctx, 1, life); err != nil {
				return err
			}
			if err := wait(t.other); err != nil {
				return err
			}
			return t.inTime("time to live", life, time.Since(sent))
		}},
	)
	if errors.Is(err, lock.ErrInvalid) && strings.ContainsAny(t.connection.prefix, "{}") {
		t.note(&t.skipped, "with sharded pub/sub the name of a latch may contain no braces, as --prefix does")
	}
	return err
}

func (t *trial) election() error {
	const first, second = "first", "second"
	var token int64
	lead := func() (func() error, error) {
		term, err := t.holder.Election(t.name).Campaign(t.ctx, first, lock.Wait(0))
		if err != nil {
			return nil, err
		}
		token = term.Token()
		return func() error { return term.Resign(t.ctx) }, nil
	}
	return t.steps(
		step{"leader", func() error {
			resign, err := lead()
			if err != nil {
				return err
			}
			switch leader, err := t.other.Election(t.name).Leader(t.ctx); {
			case err != nil:
				return err
			case leader.Value != first || leader.Token != token:
				return fmt.Errorf("the leader is %q with token %d instead of %q with token %d", leader.Value, leader.Token, first, token)
			}
			return resign()
		}},
		step{"succession", func() error {
			return t.handOver(lead, func(c *redlatch.Client) error {
				term, err := c.Election(t.name).Campaign(t.ctx, second)
				if err != nil {
					return err
				}
				if term.Token() <= token {
					err = fmt.Errorf("token %d follows %d", term.Token(), token)
				}
				return errors.Join(err, term.Resign(t.ctx))
			})
		}},
	)
}

func (t *trial) once() error {
	const slot = "slot"
	run := func(c *redlatch.Client, slot string, work func() error) (bool, error) {
		return c.Once(t.name).Run(t.ctx, slot, func(context.Context) error { return work() })
	}
	nothing := func() error { return nil }
	return t.steps(
		step{"once", func() error {
			for _, c := range []*redlatch.Client{t.holder, t.other} {
				switch ran, err := run(c, slot, nothing); {
				case err != nil:
					return err
				case ran != (c == t.holder):
					return fmt.Errorf("the work ran: %t instead of %t", ran, !ran)
				}
			}
			return nil
		}},
		step{"waiting", func() error {
			begun, finish := make(chan struct{}), make(chan struct{})
			return t.handOver(func() (func() error, error) {
				ended := t.background(func() error {
					_, err := run(t.holder, slot+"2", func() error {
						close(begun)
						select {
						case <-finish:
						case <-t.ctx.Done():
						}
						return nil
					})
					return err
				})
				select {
				case <-begun:
				case err := <-ended:
					return nil, err
				}
				return func() error {
					close(finish)
					return <-ended
				}, nil
			}, func(c *redlatch.Client) error {
				ran, err := run(c, slot+"2", nothing)
				if err == nil && ran {
					err = errors.New("the work ran twice")
				}
				return err
			})
		}},
	)
}

func (t *trial) multi() error {
	of := func(c *redlatch.Client) lock.Locker {
		members := []lock.Locker{c.Lock(t.name + ":a"), c.FairLock(t.name + ":b"), c.RWLock(t.name + ":c").Write()}
		if c != t.holder {
			slices.Reverse(members)
		}
		return c.MultiLock(members...)
	}
	return t.steps(t.exclusion(of), t.waiting(of, of), t.expiry(of, of))
}

// hashTags uses objects of all kinds in one slot. A latch cannot be there if pub/sub is sharded.
func (t *trial) hashTags() error {
	if t.conn.Mode() != rueidis.ClientModeCluster {
		t.note(&t.skipped, "the server is no cluster")
		return nil
	}
	tag := "{" + t.name + "}:"
	if strings.ContainsAny(t.connection.prefix, "{}") {
		tag = t.name + ":" // all names below --prefix have one slot
	}
	nothing := func(context.Context) error { return nil }
	var parts []step
	for _, kind := range kinds {
		parts = append(parts, step{kind, func() error { return (&lockCommand{kind: kind}).one(t.holder, tag+kind).Do(t.ctx, nothing) }})
	}
	err := t.steps(append(parts,
		step{"permits", func() error {
			return t.holder.PermitSemaphore(tag+"permits", semaphore.Permits(1)).Do(t.ctx, nothing)
		}},
		step{"semaphore", func() error { return t.holder.Semaphore(tag+"semaphore", semaphore.Permits(1)).Do(t.ctx, nothing) }},
		step{"group", func() error { return t.holder.GroupLock(tag+"group", "a", "b").Do(t.ctx, nothing) }},
		step{"rate", func() error { return t.holder.RateLimiter(tag+"rate", ratelimit.Rate(1, time.Hour)).Do(t.ctx, nothing) }},
		step{"election", func() error {
			term, err := t.holder.Election(tag+"election").Campaign(t.ctx, "", lock.Wait(0))
			if err != nil {
				return err
			}
			return term.Resign(t.ctx)
		}},
		step{"once", func() error {
			_, err := t.holder.Once(tag+"once").Run(t.ctx, "slot", nothing)
			return err
		}},
		step{"MultiLock", t.exclusion(func(c *redlatch.Client) lock.Locker {
			return c.MultiLock(c.Lock(tag+"a"), c.Lock(tag+"b"), c.Lock(tag+"c"))
		}).run},
	)...)
	var reply *rueidis.RedisError
	if errors.As(err, &reply) && strings.HasPrefix(reply.Error(), "NOPERM") && t.connection.prefix != "" {
		t.note(&t.skipped, "the user may not use such names: with braces in --prefix, such as {app}:, all names are such")
	}
	return err
}

// renewal holds a lock for longer than its lease.
func (t *trial) renewal() error {
	h, err := t.deaf.Lock(t.name).TryLock(t.ctx)
	if err != nil {
		return err
	}
	select {
	case <-h.Context().Done():
		return context.Cause(h.Context())
	case <-time.After(t.renewedLease() + t.renewedLease()/2):
	}
	return cmpErr(t.taken(t.other.Lock(t.name)), h.Unlock(t.ctx), func() error { return t.free(t.other.Lock(t.name)) })
}

// reconnection closes the connections of a client that holds a lock and waits for another one.
func (t *trial) reconnection() error {
	held := func(c *redlatch.Client) lock.Locker { return c.Lock(t.name + ":held") }
	h, err := held(t.cut.client).TryLock(t.ctx)
	if err != nil {
		return err
	}
	if err := t.steps(step{"waiting", t.waitWithout}); err != nil {
		return errors.Join(err, h.Unlock(t.ctx))
	}
	if h.Context().Err() != nil {
		return context.Cause(h.Context())
	}
	return cmpErr(t.taken(held(t.other)), h.Unlock(t.ctx), func() error { return t.free(held(t.other)) })
}

// waitWithout closes the connections of a client that waits.
func (t *trial) waitWithout() error {
	of := func(c *redlatch.Client) lock.Locker { return c.Lock(t.name + ":awaited") }
	h, err := of(t.holder).TryLock(t.ctx)
	if err != nil {
		return err
	}
	ended := t.background(func() error {
		h, err := of(t.cut.client).Lock(t.ctx)
		if err != nil {
			return err
		}
		return h.Unlock(t.ctx)
	})
	before := t.cut.client.Stats().PubSub.Reconnects
	if err := t.parked(t.cut.client, ended); err != nil {
		return errors.Join(err, h.Unlock(t.ctx))
	}
	t.cutLinks.cut()
	// A client that could not subscribe before does not reconnect.
	bound := time.Now().Add(t.within(3*time.Second, 20))
	for t.cut.client.Stats().PubSub.Reconnects == before && time.Now().Before(bound) && t.ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
	}
	if err := t.parked(t.cut.client, ended); err != nil {
		return errors.Join(err, h.Unlock(t.ctx))
	}
	if err := t.heard(t.cut, func() error { return h.Unlock(t.ctx) }); err != nil {
		return err
	}
	return t.await(ended)
}

// nodes calls ask for each node, and joins its errors.
func (t *trial) nodes(ask func(addr string, node rueidis.Client) error) error {
	nodes := t.conn.Nodes()
	var errs []error
	for _, addr := range slices.Sorted(maps.Keys(nodes)) {
		if err := ask(addr, nodes[addr]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", addr, err))
		}
	}
	return errors.Join(errs...)
}

// clock compares the clocks of the nodes with that of this machine, twice.
func (t *trial) clock() error {
	first, err := t.offsets()
	if err != nil {
		t.note(&t.skipped, t.text(err))
		return nil
	}
	const apart = 3 * time.Second
	select {
	case <-time.After(apart):
	case <-t.ctx.Done():
		return context.Cause(t.ctx)
	}
	second, err := t.offsets()
	if err != nil {
		return err
	}
	var found []string
	largest := time.Duration(0)
	for addr, now := range second {
		was, known := first[addr]
		if !known {
			continue
		}
		largest = max(largest, now.offset.Abs())
		drift := now.offset - was.offset
		switch {
		// Leases count from the request, and a hold ends by the clock of its own machine.
		case drift.Abs() > 50*time.Millisecond+now.precision+was.precision:
			found = append(found, fmt.Sprintf("%s: the clocks of the server and of this machine moved apart by %v within %v", addr, round(drift), apart))
		case now.offset.Abs() > time.Second+now.precision:
			found = append(found, fmt.Sprintf("%s: the server's clock is %v off", addr, round(now.offset)))
		}
	}
	slices.Sort(found)
	t.note(&t.warning, strings.Join(found, "; "))
	t.note(&t.detail, fmt.Sprintf("%v off", largest.Round(time.Microsecond)))
	return nil
}

// clockOffset is how far the clock of a server is ahead, and half the round trip that measured it.
type clockOffset struct{ offset, precision time.Duration }

// offsets measures the clocks of all nodes.
func (t *trial) offsets() (map[string]clockOffset, error) {
	found := map[string]clockOffset{}
	return found, t.nodes(func(addr string, node rueidis.Client) error {
		for range 3 {
			sent := time.Now()
			reply, err := node.Do(t.ctx, node.B().Time().Build()).AsIntSlice() // texts
			if err != nil || len(reply) != 2 {
				return errors.Join(errors.New("the user or the server does not permit TIME"), err)
			}
			half := time.Since(sent) / 2
			if best, known := found[addr]; !known || half < best.precision {
				found[addr] = clockOffset{time.Unix(reply[0], reply[1]*1e3).Sub(sent.Round(0).Add(half)), half}
			}
		}
		return nil
	})
}

// eviction checks that no node evicts locks.
func (t *trial) eviction() error {
	var policies, risks []string
	err := t.nodes(func(addr string, node rueidis.Client) error {
		info, err := infoOf(t.ctx, node)
		if err != nil {
			return err
		}
		policy := info["maxmemory_policy"]
		if policy == "" {
			return errors.New("the server does not tell its policy")
		}
		if policy != "noeviction" && info["maxmemory"] != "0" {
			risks = append(risks, fmt.Sprintf("%s: maxmemory-policy is %s, which evicts locks when the memory is full: set it to noeviction", addr, policy))
		} else if policy != "noeviction" {
			policy += ", without a limit of memory"
		}
		if !slices.Contains(policies, policy) {
			policies = append(policies, policy)
		}
		return nil
	})
	switch {
	case len(risks) > 0:
		t.note(&t.warning, strings.Join(risks, "; "))
	case err != nil:
		t.note(&t.skipped, t.text(err))
	}
	t.note(&t.detail, strings.Join(policies, "; "))
	return nil
}

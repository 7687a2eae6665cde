package locking

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Member is embedded by every kind of lock so that Find sees what it stands on.
type Member struct{ of *Lock }

// Member returns what a kind of lock embeds.
func (l *Lock) Member() Member { return Member{l} }

func (m Member) self() *Lock { return m.of }

// Find returns what l stands on if it is a lock of this module. Of any other Locker
// nothing is known but what lock.Locker promises.
func Find(l lock.Locker) (*Lock, bool) {
	m, ok := l.(interface{ self() *Lock })
	if !ok {
		return nil, false
	}
	of := m.self()
	// A type of somebody else that embeds a lock may have a Lock of its own.
	return of, packageOf(l) == packageOf(of.p)
}

// packageOf returns where the type of v, or what it points to, is declared.
func packageOf(v any) string {
	t := reflect.TypeOf(v)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.PkgPath()
}

// Session returns the session of the client that has made the lock.
func (l *Lock) Session() *session.Session { return l.s }

// Kind returns the kind of lock, as it stands in logs and telemetry.
func (l *Lock) Kind() string { return l.p.Traits().Kind }

// Channel is where the release of the lock is published, "" if that is not the same
// for all waiters.
func (l *Lock) Channel() string {
	if l.p.Traits().Ordered {
		return ""
	}
	return l.p.Channel(&Claim{Key: l.key})
}

// Shared reports whether several owners can hold the lock at once.
func (l *Lock) Shared() bool { return l.p.Traits().Shared }

// Take is Lock, or TryLock if once is set, for one of several locks that are taken as
// one: even with a lease the hold is renewed until Settle, and MaxHold counts from
// there.
func Take(ctx context.Context, l *Lock, o lock.Options, once bool) (lock.Hold, error) {
	o.MaxHold = 0
	h, err := l.acquire(ctx, o, once, true)
	if err != nil {
		return nil, err
	}
	return part(h), nil
}

// part returns the handle of a hold that is part of another: it is for that one to be
// noticed when it is dropped.
func part(h *hold) lock.Hold { return &handle{h: h} }

// Waited reports whether others were in the way of a hold, as far as that is known.
func Waited(h lock.Hold) bool {
	hd, ok := h.(*handle)
	return ok && hd.h.waited
}

// Told returns how many subscribers heard of the release of a hold that was unlocked, less
// than 0 if that is not known, or others may wait for it who do not hear of it.
func Told(h lock.Hold) int {
	hd, ok := h.(*handle)
	if !ok || hd.h.lock.Channel() == "" || hd.h.lock.p.Traits().Polled {
		return -1
	}
	return int(hd.h.told)
}

// Whole is what a hold is part of.
type Whole interface {
	// PartEnded is told that a part was lost, or unlocked by others. It must not block.
	PartEnded(cause *lock.LostError)
}

// Watch has w told when h ends by itself, once. It reports false if h is no hold of this
// module.
func Watch(h lock.Hold, w Whole) bool {
	hd, ok := h.(*handle)
	if ok {
		hd.h.watch(w)
	}
	return ok
}

func (h *hold) watch(w Whole) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.whole = w
	if h.state != held {
		h.tellWhole(h.lost)
	}
}

// Unwatch undoes Watch.
func Unwatch(h lock.Hold) {
	if hd, ok := h.(*handle); ok {
		hd.h.mu.Lock()
		defer hd.h.mu.Unlock()
		hd.h.whole = nil
	}
}

// tellWhole tells what h is part of that h has ended. h.mu is held.
func (h *hold) tellWhole(lost *lock.LostError) {
	w := h.whole
	if w == nil {
		return
	}
	h.whole = nil
	if lost == nil { // somebody has unlocked it by its owner
		lost = h.lostError(lock.ReasonGone, nil)
	}
	w.PartEnded(lost)
}

// maxTogether bounds for how long the script of several locks keeps the server.
const maxTogether = 100

// Together returns how many of the locks, from the first on, one script can take.
func Together(ctx context.Context, locks []*Lock) int {
	if _, named := lock.OwnerFrom(ctx); named {
		return 1
	}
	n := 0
	for n < min(len(locks), maxTogether) && locks[n].joins(locks[0]) {
		n++
	}
	return max(n, 1)
}

// joins reports whether one script can be about both locks.
func (l *Lock) joins(other *Lock) bool {
	return l.p.Traits().Batch && other.p.Traits().Batch && l.s == other.s &&
		(!l.s.Cluster() || wire.Slot(l.key) == wire.Slot(other.key))
}

// TakeTogether takes, with one script and in their order, those of the locks before the
// first that somebody else has, or waits for in this process; with all set it takes all
// or none and looks at nobody who waits. The locks are some that Together has counted.
// It does not wait. The holds are as those of Take. The error is of an attempt that had
// no answer, and is not returned with a hold.
func TakeTogether(ctx context.Context, locks []*Lock, o lock.Options, all bool) ([]lock.Hold, error) {
	s := locks[0].s
	if !s.Enter() {
		return nil, lock.ErrClosed
	}
	defer s.Leave()
	o.MaxHold = 0
	reqCtx := ctx
	if o.Bounded && !all {
		var cancel context.CancelFunc
		reqCtx, cancel = context.WithTimeout(ctx, o.Wait)
		defer cancel()
	}
	holds := make([]*hold, len(locks))
	reqs := make([]queue.Request, len(locks))
	for i, l := range locks {
		holds[i] = l.newHold(ctx, o, true)
		reqs[i] = queue.Request{Key: l.queueKey(), Acquirer: holds[i], Once: all}
	}
	var err error
	n := s.Queues.Together(reqs, func(n int) []queue.Result {
		results := tryTogether(reqCtx, holds[:n], all)
		if u := (*queue.Unavailable)(nil); errors.As(results[0].Err, &u) {
			err = u.Err
		} else {
			err = results[0].Err
		}
		return results
	})
	return beginTogether(ctx, holds[:n], err)
}

func tryTogether(ctx context.Context, holds []*hold, all bool) []queue.Result {
	claims := make([]*Claim, len(holds))
	for i, h := range holds {
		claims[i] = &h.claim
	}
	sent := time.Now()
	answers, err := holds[0].lock.p.(Batched).AcquireEach(ctx, claims, all)
	results := make([]queue.Result, len(holds))
	for i, h := range holds {
		var a Answer
		if err == nil {
			a = answers[i]
		}
		results[i].Verdict, results[i].Err = h.answered(sent, a, err)
	}
	return results
}

// beginTogether is begin for all of them, or for none if one fails.
func beginTogether(ctx context.Context, holds []*hold, err error) ([]lock.Hold, error) {
	begun := make([]lock.Hold, 0, len(holds))
	for _, h := range holds {
		if beginErr := h.begin(ctx); beginErr != nil {
			err = errors.Join(err, beginErr)
		} else {
			begun = append(begun, part(h))
		}
	}
	if err != nil {
		return nil, errors.Join(err, UnlockTogether(ctx, begun))
	}
	return begun, nil
}

// Settle makes the lease of holds that are taken as one count from the last of them,
// and MaxHold too. Leases that were asked for are not renewed any more. It returns an
// error if a hold is lost, or its lease may be too short.
func Settle(ctx context.Context, holds []lock.Hold, o lock.Options) error {
	var last time.Time
	for _, h := range holds {
		if hd, ok := h.(*handle); ok && hd.h.sent.After(last) {
			last = hd.h.sent
		}
	}
	var late []lock.Hold
	for _, h := range holds {
		hd, ok := h.(*handle)
		if ok && o.MaxHold > 0 {
			hd.h.lease.EndAt(last.Add(o.MaxHold))
		}
		switch {
		case o.Lease == 0:
		case ok && hd.h.sent.Equal(last):
			hd.h.lease.Fix(last, o.Lease)
		default:
			late = append(late, h)
		}
	}
	return errors.Join(extendTogether(ctx, late, o.Lease, true, (*watchdog.Lease).Fix)...)
}

// ExtendTogether is Extend for several holds, with one script for those for which that
// can be. It returns what became of each. As a renewal it is not delayed by other
// commands, unless detour is set.
func ExtendTogether(ctx context.Context, holds []lock.Hold, lease time.Duration, detour bool) []error {
	return extendTogether(ctx, holds, lease, detour, (*watchdog.Lease).Extended)
}

func extendTogether(ctx context.Context, holds []lock.Hold, lease time.Duration, detour bool,
	note func(l *watchdog.Lease, sent time.Time, ttl time.Duration)) []error {
	type group struct {
		renewer watchdog.Renewer
		slot    int
	}
	groups := make(map[group][]int)
	errs := make([]error, len(holds))
	for i, h := range holds {
		hd, ok := h.(*handle)
		if !ok {
			errs[i] = h.Extend(ctx, lease)
			continue
		}
		if errs[i] = hd.h.current("Extend"); errs[i] != nil {
			continue
		}
		g := group{renewer: hd.h.lock.p.Renewer()}
		if hd.h.lock.s.Cluster() {
			g.slot = wire.Slot(hd.h.claim.Key)
		}
		groups[g] = append(groups[g], i)
	}
	for g, members := range groups {
		for batch := range slices.Chunk(members, maxTogether) {
			leases := make([]*watchdog.Lease, len(batch))
			for j, i := range batch {
				leases[j] = &holds[i].(*handle).h.lease
			}
			sent := time.Now()
			r := g.renewer.Renew(ctx, [][]*watchdog.Lease{leases}, lease, detour)[0]
			for j, i := range batch {
				h := holds[i].(*handle).h
				switch {
				case r.Err != nil:
					errs[i] = fmt.Errorf("redlatch: extend %q: %w", h.lock.name, r.Err)
					continue
				case r.Held[j]:
					note(&h.lease, sent, lease)
				default:
					h.Lost(lock.ReasonGone, nil)
				}
				errs[i] = h.current("Extend")
			}
		}
	}
	return errs
}

// UnlockTogether unlocks holds in reverse, and with one script those for which that can
// be; those of different clients at the same time. It returns the errors of all of them,
// joined. It blocks like lock.Hold's Unlock.
func UnlockTogether(ctx context.Context, holds []lock.Hold) error {
	if len(holds) == 0 {
		return nil
	}
	first := sessionOf(holds[0])
	several := slices.ContainsFunc(holds, func(h lock.Hold) bool { return sessionOf(h) != first })
	if !several {
		return unlockReversed(ctx, holds)
	}
	bySession := make(map[*session.Session][]lock.Hold)
	for _, h := range holds {
		s := sessionOf(h)
		bySession[s] = append(bySession[s], h)
	}
	return atOnce(bySession, func(holds []lock.Hold) error { return unlockReversed(ctx, holds) })
}

// sessionOf returns the session of a hold, nil of a hold that is not of this module.
func sessionOf(h lock.Hold) *session.Session {
	if hd, ok := h.(*handle); ok {
		return hd.h.lock.s
	}
	return nil
}

// GiveBack is UnlockTogether for holds that nobody has been given. What was lost only
// because its client is being closed is released too.
func GiveBack(ctx context.Context, holds []lock.Hold) error {
	err := UnlockTogether(ctx, holds)
	for _, h := range slices.Backward(holds) {
		if hd, ok := h.(*handle); ok && hd.h.lostByClosing() {
			hd.h.lock.closing(func(ctx context.Context) { _, _ = hd.h.lock.p.Release(ctx, &hd.h.claim, false) })
		}
	}
	return err
}

func (h *hold) lostByClosing() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost != nil && h.lost.Reason == lock.ReasonClosed
}

// OfOpenClients returns those of the holds whose client is not closed.
func OfOpenClients(holds []lock.Hold) []lock.Hold {
	return slices.DeleteFunc(slices.Clone(holds), func(h lock.Hold) bool {
		hd, ok := h.(*handle)
		return ok && hd.h.lock.s.Err() != nil
	})
}

// atOnce calls f for all groups at once and joins their errors.
func atOnce[K comparable, T any](groups map[K]T, f func(T) error) error {
	if len(groups) == 1 {
		for _, g := range groups {
			return f(g)
		}
	}
	var (
		mu   sync.Mutex
		errs []error
		done sync.WaitGroup
	)
	for _, g := range groups {
		done.Go(func() {
			err := f(g)
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	done.Wait()
	return errors.Join(errs...)
}

// unlockReversed unlocks holds of one client.
func unlockReversed(ctx context.Context, holds []lock.Hold) error {
	var (
		errs   []error
		batch  []ending
		silent bool // the server does not answer, and nothing waits for it one by one
		others = make(map[int]lock.Hold)
	)
	for i, h := range slices.Backward(holds) {
		hd, ok := h.(*handle)
		switch {
		case ok && hd.h.lock.p.Traits().Batch && !hd.h.named:
			hd.givenBack()
			e, err := hd.h.startUnlock(ctx)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if batch == nil {
				batch = make([]ending, 0, i+1)
			}
			batch = append(batch, e)
		case silent:
			others[i] = h
		default:
			err := h.Unlock(ctx)
			errs = append(errs, err)
			silent = errors.Is(err, lock.ErrIndeterminate)
		}
	}
	if len(others) > 0 {
		errs = append(errs, atOnce(others, func(h lock.Hold) error { return h.Unlock(ctx) }))
	}
	groups := make(map[int][]ending)
	for len(batch) > 0 {
		n := 1
		for n < min(len(batch), maxTogether) && batch[n].h.lock.joins(batch[0].h.lock) {
			n++
		}
		groups[len(groups)], batch = batch[:n], batch[n:]
	}
	if len(groups) > 0 {
		errs = append(errs, atOnce(groups, releaseTogether))
	}
	return errors.Join(errs...)
}

// ending is a hold that is being unlocked.
type ending struct {
	h        *hold
	ctx      context.Context // of its requests
	released func(error)     // ends the span of the release
}

// done is called with what became of the release, and returns it.
func (e ending) done(err error) error {
	e.released(err)
	if err == nil {
		e.h.span.End(nil)
		return nil
	}
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	e.h.span.End(lostErr)
	return err
}

// releaseTogether passes on those that somebody in this process waits for, each by itself,
// and releases the others with one script, all at the same time.
func releaseTogether(endings []ending) error {
	free := make([]ending, 0, len(endings))
	tasks := make(map[int]func() error)
	for i, e := range endings {
		if heirs := e.h.lock.s.Queues.Successors(e.h.lock.queueKey(), true); heirs != nil {
			tasks[i] = func() error { return e.done(e.h.release(e.ctx, heirs, false)) }
		} else {
			free = append(free, e)
		}
	}
	if len(free) > 0 {
		tasks[len(endings)] = func() error { return releaseFree(free) }
	}
	return atOnce(tasks, func(task func() error) error { return task() })
}

// releaseFree releases, with one script, what nobody in this process waits for.
func releaseFree(free []ending) error {
	first := free[0]
	if len(free) == 1 {
		return first.done(first.h.release(first.ctx, nil, false))
	}
	claims := make([]*Claim, len(free))
	for i, e := range free {
		claims[i] = &e.h.claim
	}
	ctx, cancel := first.h.lock.s.Bounded(first.ctx)
	released, err := first.h.lock.p.(Batched).ReleaseEach(ctx, claims)
	cancel()
	var errs []error
	alone := make(map[*hold]ending) // what is left to be released one by one
	for i, e := range free {
		if err != nil || released[i].State == Shared {
			alone[e.h] = e
			continue
		}
		e.h.lock.s.Queues.Released(e.h.lock.queueKey(), e.h, queue.Release{Told: released[i].Told})
		errs = append(errs, e.done(e.h.releaseError(released[i], nil)))
	}
	if len(alone) > 0 {
		maybe := err != nil && wire.OutcomeOf(err) == wire.Unknown
		errs = append(errs, atOnce(alone, func(e ending) error { return e.done(e.h.release(e.ctx, nil, maybe)) }))
	}
	return errors.Join(errs...)
}

// startUnlock ends a hold, of which only the release is left, or returns why there is
// nothing to be released.
func (h *hold) startUnlock(ctx context.Context) (ending, error) {
	if err := h.end(); err != nil {
		return ending{}, err
	}
	ctx, released := h.span.StartRelease(ctx)
	if ctx.Done() != nil {
		ctx = context.WithoutCancel(ctx)
	}
	return ending{h, ctx, released}, nil
}

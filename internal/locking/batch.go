package locking

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

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
// first that is taken, or that this process waits for; with all set it takes all or none,
// regardless of waiters. The locks are some that Together has counted.
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
	claims := make([]*claim, len(locks))
	reqs := make([]acquire.Request[*claim], len(locks))
	for i, l := range locks {
		claims[i] = l.newClaim(ctx, o, true)
		claims[i].freshID()
		reqs[i] = acquire.Request[*claim]{Key: l.queueKey(), Acquirer: claims[i], Once: all}
	}
	var err error
	n := locks[0].q.Together(reqs, func(n int) []acquire.Result {
		results := tryTogether(reqCtx, claims[:n], all)
		if u := (*acquire.Unavailable)(nil); errors.As(results[0].Err, &u) {
			err = u.Err
		} else {
			err = results[0].Err
		}
		return results
	})
	return standTogether(ctx, claims[:n], err)
}

func tryTogether(ctx context.Context, claims []*claim, all bool) []acquire.Result {
	asked := make([]*Claim, len(claims))
	for i, c := range claims {
		asked[i] = &c.Claim
	}
	sent := time.Now()
	answers, err := claims[0].lock.p.(Batched).AcquireEach(ctx, asked, all)
	results := make([]acquire.Result, len(claims))
	for i, c := range claims {
		var a Answer
		if err == nil {
			a = answers[i]
		}
		results[i].Verdict, results[i].Err = c.answered(sent, a, err)
	}
	return results
}

// standTogether is stand for all of them, or for none if one fails.
func standTogether(ctx context.Context, claims []*claim, err error) ([]lock.Hold, error) {
	holds := make([]lock.Hold, 0, len(claims))
	for _, c := range claims {
		if h, standErr := c.stand(ctx); standErr != nil {
			err = errors.Join(err, standErr)
		} else {
			holds = append(holds, memberHandle(h))
		}
	}
	if err != nil {
		return nil, errors.Join(err, UnlockTogether(ctx, holds))
	}
	return holds, nil
}

// Align makes the lease of holds that are taken as one count from the last of them,
// and MaxHold too. Leases that were asked for are not renewed any more. It returns an
// error if a hold is lost, or its lease may be too short.
func Align(ctx context.Context, holds []lock.Hold, o lock.Options) error {
	var last time.Time
	for _, h := range holds {
		if hd, ok := h.(*handle); ok && hd.h.claim.sent.After(last) {
			last = hd.h.claim.sent
		}
	}
	var late []lock.Hold
	for _, h := range holds {
		hd, ok := h.(*handle)
		if ok && o.MaxHold > 0 {
			hd.h.endAt(last.Add(o.MaxHold))
		}
		switch {
		case o.Lease == 0:
		case ok && hd.h.claim.sent.Equal(last):
			hd.h.fix(last, o.Lease)
		default:
			late = append(late, h)
		}
	}
	return errors.Join(extendTogether(ctx, late, o.Lease, true, (*hold).fix)...)
}

// ExtendTogether is Extend for several holds, with one script for those for which that
// can be. It returns what became of each. As a renewal it is not delayed by other
// commands, unless shared is set.
func ExtendTogether(ctx context.Context, holds []lock.Hold, lease time.Duration, shared bool) []error {
	return extendTogether(ctx, holds, lease, shared, (*hold).extended)
}

func extendTogether(ctx context.Context, holds []lock.Hold, lease time.Duration, shared bool,
	note func(h *hold, sent time.Time, ttl time.Duration)) []error {
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
		g := group{renewer: hd.h.claim.lock.p.Renewer()}
		if hd.h.claim.lock.s.Cluster() {
			g.slot = wire.Slot(hd.h.claim.Key)
		}
		groups[g] = append(groups[g], i)
	}
	for g, members := range groups {
		for batch := range slices.Chunk(members, maxTogether) {
			leases := make([]*watchdog.Lease, len(batch))
			for j, i := range batch {
				leases[j] = &holds[i].(*handle).h.claim.lease
			}
			sent := time.Now()
			r := g.renewer.Renew(ctx, [][]*watchdog.Lease{leases}, lease, shared)[0]
			for j, i := range batch {
				h := holds[i].(*handle).h
				switch {
				case r.Err != nil:
					errs[i] = fmt.Errorf("redlatch: extend %q: %w", h.claim.lock.name, r.Err)
					continue
				case r.Held[j]:
					note(h, sent, lease)
				default:
					h.claim.Lost(lock.ReasonGone, nil)
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
		return hd.h.claim.lock.s
	}
	return nil
}

// GiveBack is UnlockTogether for holds that no caller has. What was lost only
// because its client is being closed is released too.
func GiveBack(ctx context.Context, holds []lock.Hold) error {
	err := UnlockTogether(ctx, holds)
	for _, h := range slices.Backward(holds) {
		if hd, ok := h.(*handle); ok && hd.h.lostByClosing() {
			hd.h.claim.lock.closing(func(ctx context.Context) { _, _ = hd.h.claim.lock.p.Release(ctx, &hd.h.claim.Claim) })
		}
	}
	return err
}

func (h *hold) lostByClosing() bool {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	return h.lost != nil && h.lost.Reason == lock.ReasonClosed
}

// OfOpenClients returns those of the holds whose client is not closed.
func OfOpenClients(holds []lock.Hold) []lock.Hold {
	return slices.DeleteFunc(slices.Clone(holds), func(h lock.Hold) bool {
		hd, ok := h.(*handle)
		return ok && hd.h.claim.lock.s.Err() != nil
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
		case ok && hd.h.claim.lock.p.Traits().Batch:
			hd.givenBack()
			e, err := hd.h.startUnlock(ctx)
			if err != nil || !e.last {
				if err == nil {
					err = e.done(nil)
				}
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
		for n < min(len(batch), maxTogether) && batch[n].claim.lock.joins(batch[0].claim.lock) {
			n++
		}
		groups[len(groups)], batch = batch[:n], batch[n:]
	}
	if len(groups) > 0 {
		errs = append(errs, atOnce(groups, releaseTogether))
	}
	return errors.Join(errs...)
}

// releaseTogether releases those that were passed on, each by itself, and the others with one
// script, all at the same time.
func releaseTogether(endings []ending) error {
	free := make([]ending, 0, len(endings))
	tasks := make(map[int]func() error)
	for i, e := range endings {
		c := e.claim
		if c.cohort != nil {
			tasks[i] = func() error { return e.alone(false) }
		} else {
			c.lock.q.Pass(c.lock.queueKey(), c, func(*claim) bool { return false })
			free = append(free, e)
		}
	}
	if len(free) > 0 {
		tasks[len(endings)] = func() error { return releaseFree(free) }
	}
	return atOnce(tasks, func(task func() error) error { return task() })
}

// releaseFree releases, with one script, those without waiters in this process.
func releaseFree(free []ending) error {
	first := free[0]
	if len(free) == 1 {
		return first.alone(false)
	}
	claims := make([]*Claim, len(free))
	for i, e := range free {
		claims[i] = &e.claim.Claim
	}
	l := first.claim.lock
	ctx, cancel := l.s.Bounded(first.ctx)
	freed, done, err := l.p.(Batched).ReleaseEach(ctx, claims)
	cancel()
	var errs []error
	rest := make(map[*claim]ending) // to be released one by one
	for i, e := range free {
		c := e.claim
		if err != nil || !done[i] {
			rest[c] = e
			continue
		}
		l.q.Released(c.lock.queueKey(), c, acquire.Release{Receivers: freed[i].Receivers})
		errs = append(errs, e.done(c.releaseError(freed[i], nil)))
	}
	if len(rest) > 0 {
		errs = append(errs, atOnce(rest, func(e ending) error { return e.alone(unknown(err)) }))
	}
	return errors.Join(errs...)
}

// alone releases the claim by itself.
func (e ending) alone(mayHaveRun bool) error {
	return e.done(e.claim.cohort.Release(func() error { return e.claim.giveBack(e.ctx, false, mayHaveRun) }))
}

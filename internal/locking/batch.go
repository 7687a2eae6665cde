package locking

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// maxTogether is the most locks that one script handles. It bounds how long the server is busy.
const maxTogether = 100

// Together returns how many of the locks, counted from the first, one script can acquire.
func Together(ctx context.Context, locks []*Lock) int {
	if _, named := lock.OwnerFrom(ctx); named {
		return 1
	}
	n := 1
	for n < min(len(locks), maxTogether) && locks[n].joins(locks[0]) {
		n++
	}
	return n
}

// joins reports whether one script can handle both locks.
func (l *Lock) joins(other *Lock) bool {
	return l.p.Traits().Batch && other.p.Traits().Batch && l.s == other.s && l.Slot() == other.Slot()
}

// TakeTogether acquires locks that Together has counted, with one script and in order, up to
// the first that is held or has a local waiter. With all set it acquires all or none, and
// ignores waiters. It does not wait. The holds are like those of Take. An error means that
// the attempt had no answer, and that there are no holds.
func TakeTogether(ctx context.Context, locks []*Lock, o lock.Options, all bool) ([]*Hold, error) {
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
		results := attempt(claims[:n], func(claims []*Claim) ([]Answer, error) {
			return locks[0].p.(Batched).AcquireEach(reqCtx, claims, all)
		})
		if u := (*acquire.Unavailable)(nil); errors.As(results[0].Err, &u) {
			err = u.Err
		} else {
			err = results[0].Err
		}
		return results
	})
	holds := make([]*Hold, 0, n)
	for _, c := range claims[:n] {
		if h, standErr := c.stand(ctx); standErr != nil {
			err = errors.Join(err, standErr)
		} else {
			holds = append(holds, h)
		}
	}
	if err != nil { // all or none
		return nil, errors.Join(err, UnlockTogether(ctx, holds))
	}
	return holds, nil
}

// Align makes the leases of the holds of a group, and MaxHold, count from the acquisition of
// the last one, and ends the renewal of leases that the caller set. It returns an error if a
// hold is lost, or its lease may be too short.
func Align(ctx context.Context, holds []*Hold, o lock.Options) error {
	var last time.Time
	for _, h := range holds {
		if h.claim.sent.After(last) {
			last = h.claim.sent
		}
	}
	var late []*Hold
	for _, h := range holds {
		if o.MaxHold > 0 {
			h.endAt(last.Add(o.MaxHold))
		}
		switch {
		case o.Lease == 0:
		case h.claim.sent.Equal(last):
			h.fix(last, o.Lease)
		default:
			late = append(late, h)
		}
	}
	return errors.Join(extendTogether(ctx, late, o.Lease, true, (*hold).fix)...)
}

// ExtendTogether is Extend for several holds, with as few scripts as possible. It returns an
// error for each hold. Unless shared is set, it uses the connection of renewals, where other
// commands do not delay it.
func ExtendTogether(ctx context.Context, holds []*Hold, lease time.Duration, shared bool) []error {
	return extendTogether(ctx, holds, lease, shared, (*hold).extended)
}

func extendTogether(ctx context.Context, holds []*Hold, lease time.Duration, shared bool,
	note func(h *hold, sent time.Time, ttl time.Duration)) []error {
	type group struct {
		renewer watchdog.Renewer
		slot    int
	}
	groups := make(map[group][]int)
	errs := make([]error, len(holds))
	for i, h := range holds {
		if errs[i] = h.current("Extend"); errs[i] == nil {
			g := group{h.claim.lock.p.Renewer(), h.claim.lock.Slot()}
			groups[g] = append(groups[g], i)
		}
	}
	for g, members := range groups {
		for batch := range slices.Chunk(members, maxTogether) {
			leases := make([]*watchdog.Lease, len(batch))
			for j, i := range batch {
				leases[j] = &holds[i].claim.lease
			}
			sent := time.Now()
			r := g.renewer.Renew(ctx, [][]*watchdog.Lease{leases}, lease, shared)[0]
			for j, i := range batch {
				h := holds[i]
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

// UnlockTogether unlocks holds at once, with as few scripts as possible, and joins their
// errors. It blocks like lock.Hold's Unlock.
func UnlockTogether(ctx context.Context, holds []*Hold) error {
	var (
		errs  []error
		tasks []func() error
		free  []ending
	)
	for _, h := range slices.Backward(holds) {
		c := h.claim
		if !c.lock.p.Traits().Batch {
			tasks = append(tasks, func() error { return h.Unlock(ctx) })
			continue
		}
		e, err := h.startUnlock(ctx)
		if err != nil {
			errs = append(errs, err)
		} else if !e.last {
			errs = append(errs, e.Released(e.released, nil))
		} else {
			c.lock.q.Pass(c.lock.queueKey(), c, func(*claim) bool { return false }) // it may yield
			free = append(free, e)
		}
	}
	for len(free) > 0 {
		n := 1
		for n < min(len(free), maxTogether) && free[n].claim.lock.joins(free[0].claim.lock) {
			n++
		}
		batch := free[:n]
		tasks, free = append(tasks, func() error { return releaseFree(batch) }), free[n:]
	}
	return errors.Join(append(errs, atOnce(tasks))...)
}

// GiveBack is UnlockTogether for holds that no caller has. It also releases those that were
// lost only because their client is closing.
func GiveBack(ctx context.Context, holds []*Hold) error {
	err := UnlockTogether(ctx, holds)
	for _, h := range holds {
		c := h.claim
		if loss := h.Loss(); loss != nil && loss.Reason == lock.ReasonClosed {
			c.lock.cleanUp(c.Claim, false)
		}
	}
	return err
}

// atOnce runs tasks at once and joins their errors.
func atOnce(tasks []func() error) error {
	if len(tasks) == 1 {
		return tasks[0]()
	}
	errs := make([]error, len(tasks))
	var done sync.WaitGroup
	for i, task := range tasks {
		done.Go(func() { errs[i] = task() })
	}
	done.Wait()
	return errors.Join(errs...)
}

// releaseFree releases claims with one script.
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
	var rest []func() error // to be released one by one
	for i, e := range free {
		c := e.claim
		if err != nil || !done[i] {
			rest = append(rest, func() error { return e.alone(unknown(err)) })
			continue
		}
		l.q.Released(c.lock.queueKey(), c, acquire.Release{Receivers: freed[i].Receivers})
		errs = append(errs, e.Released(e.released, c.releaseError(freed[i], nil)))
	}
	return errors.Join(append(errs, atOnce(rest))...)
}

// alone releases the claim by itself.
func (e ending) alone(mayHaveRun bool) error {
	return e.Released(e.released, e.claim.giveBack(e.ctx, false, mayHaveRun))
}

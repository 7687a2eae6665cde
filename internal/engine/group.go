package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
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
	return l.kind.Batched != nil && other.kind.Batched != nil && l.s == other.s && l.Slot() == other.Slot()
}

// TakeTogether acquires locks that Together has counted, with one script and in order, up to
// the first that is held or has a local waiter. With all set it acquires all or none, and
// ignores waiters. It does not wait. The holds are like the hold of Take. With an error there are no
// holds: the attempt had no answer, or, with all set, the error says which lock is held.
func TakeTogether(ctx context.Context, locks []*Lock, o lock.Options, all bool) ([]GroupHold, error) {
	s := locks[0].s
	if !s.Enter() {
		return nil, lock.ErrClosed
	}
	defer s.Leave()

	o.MaxHold = 0
	o.Parent = nil
	o.AtLeast = 0
	made := make([]claim, len(locks)) // one allocation
	claims := make([]*claim, len(locks))
	reqs := make([]Request, 0, 4) // more are rare, and take an allocation
	for i, l := range locks {
		c := &made[i]
		c.init(ctx, l, &o, true)
		claims[i] = c
		reqs = append(reqs, Request{Ctx: ctx, Key: l.queue, Acquirer: c, Once: all})
	}

	var err error
	began := time.Now()
	n := locks[0].e.Together(reqs, func(n int) (acquired int) {
		acquired, err = attemptEach(ctx, claims[:n], all, began)
		return acquired
	})
	got := make([]GroupHold, 0, n)
	for _, c := range claims[:n] {
		if h, holdErr := c.hold(ctx, ctx); holdErr != nil {
			err = errors.Join(err, holdErr)
		} else {
			got = append(got, h)
		}
	}

	if err != nil && ctx.Err() != nil {
		undone := make([]<-chan struct{}, len(claims))
		for i, c := range claims {
			undone[i] = c.cancel()
		}
		if session.Await(undone...) {
			err = wire.Undone(ctx, err)
		}
	}

	if err != nil {
		return nil, errors.Join(err, errors.Join(UnlockTogether(ctx, got)...))
	}

	return got, nil
}

// attemptEach makes an attempt of TakeTogether, and returns how many of the claims have acquired, from
// the first on. The acquisition began then.
func attemptEach(ctx context.Context, claims []*claim, all bool, began time.Time) (acquired int, err error) {
	asked := make([]*Claim, len(claims))
	for i, c := range claims {
		asked[i] = &c.Claim
	}
	sent := time.Now()
	several, reqErr := claims[0].lock.kind.Batched.AcquireEach(ctx, asked, all)
	for i, c := range claims {
		v, failed := c.answered(sent, Answer{Acquired: i < several.Acquired, FreeIn: several.FreeIn}, reqErr)
		if failed == nil && v.Acquired {
			acquired++
		}
		if i == 0 {
			err = failed
		}
	}

	if wire.NotSent(ctx, reqErr) { // the wait is over
		return acquired, nil
	}

	if err != nil {
		if u := (*Unavailable)(nil); errors.As(err, &u) {
			err = u.Err
		}
	} else if all && several.Acquired < len(claims) {
		err = claims[several.FirstConflict].lock.failed(ctx, "acquire", began, lock.ErrNotAcquired)
	}

	return acquired, err
}

// Align makes the leases of the holds of a group count from the acquisition of the last one, and MaxHold
// from now, and ends the renewal of leases that the caller set. It returns an error if a
// hold is lost, or its lease may be too short.
func Align(ctx context.Context, holds []GroupHold, o lock.Options) error {
	var last time.Time
	for _, h := range holds {
		if sent := h.Acquired(); sent.After(last) {
			last = sent
		}
	}

	end := time.Now().Add(o.MaxHold)
	var late []GroupHold
	for _, h := range holds {
		if o.MaxHold > 0 {
			h.EndAt(end)
		}
		if o.Lease == 0 {
			continue
		}
		if one := h.One(); one != nil && one.requested() && one.Acquired().Equal(last) {
			one.fix(last, o.Lease)
		} else { // the server may have given it less
			late = append(late, h)
		}
	}

	if len(late) == 0 {
		return nil
	}

	errs := make([]error, len(late))
	extendTogether(ctx, late, o.Lease, true, (*Hold).fix, func(i int, err error) { errs[i] = err })
	return errors.Join(errs...)
}

// ExtendTogether is Extend for several holds, with as few scripts as possible. It calls done
// with the result for each hold as soon as its server has answered, at once for several
// servers, and returns after the last call. Unless shared is set, it uses the connection of renewals, where
// other commands do not delay it.
func ExtendTogether[H AnyHold](ctx context.Context, holds []H, lease time.Duration, shared bool,
	done func(i int, err error)) {
	extendTogether(ctx, holds, lease, shared, (*Hold).extended, done)
}

func extendTogether[H AnyHold](ctx context.Context, all []H, lease time.Duration, shared bool,
	note func(h *Hold, sent time.Time, ttl time.Duration), done func(i int, err error)) {
	type group struct {
		renewer watchdog.Renewer
		slot    int
	}
	groups := make(map[group][]int)
	holds := make([]*Hold, len(all))
	var tasks []func()
	for i, one := range all {
		h := one.One()
		if h == nil {
			tasks = append(tasks, func() { done(i, one.Extend(ctx, lease)) })
		} else if err := h.current("extend"); err != nil {
			done(i, err)
		} else {
			holds[i] = h
			if lease > h.ttl {
				h.claim.keepFromHandOff()
			}
			g := group{h.claim.lock.p.Renewer(), h.claim.lock.Slot()}
			groups[g] = append(groups[g], i)
		}
	}
	batches := make(map[watchdog.Renewer][][]int)
	for g, members := range groups {
		batches[g.renewer] = slices.AppendSeq(batches[g.renewer], slices.Chunk(members, maxTogether))
	}
	for renewer, batches := range batches {
		tasks = append(tasks, func() {
			leases := make([][]watchdog.Subject, len(batches))
			for b, batch := range batches {
				for _, i := range batch {
					leases[b] = append(leases[b], holds[i].claim.Leased())
				}
			}
			sent := time.Now()
			for b, r := range renewer.Renew(ctx, leases, lease, shared) {
				for j, i := range batches[b] {
					h := holds[i]
					err := r.ErrOf(j)
					if err != nil {
						done(i, h.claim.lock.failed(ctx, "extend", sent, err))
						continue
					}
					if r.Held[j] {
						note(h, sent, lease)
					} else {
						h.claim.Lost(lock.ReasonGone, nil)
					}
					done(i, h.current("extend"))
				}
			}
		})
	}
	atOnce(tasks)
}

// UnlockTogether unlocks holds at once, with as few scripts as possible, and returns an error
// for each. It blocks like lock.Hold's Unlock.
func UnlockTogether[H AnyHold](ctx context.Context, holds []H) []error {
	errs := make([]error, len(holds))
	free := make([]freeing, 0, len(holds))
	var apart []int // those that no script releases with others
	var tasks []func()
	for i := len(holds) - 1; i >= 0; i-- {
		h := holds[i].One()
		if h == nil || h.claim.lock.kind.Batched == nil || h.claim.endsAlone() {
			apart = append(apart, i)
			continue
		}
		c := h.claim
		e, err := h.startUnlock(ctx, release)
		if err != nil {
			errs[i] = err
			tasks = append(tasks, func() { h.releaseAfterLoss(ctx, err) })
		} else if !e.last {
			errs[i] = e.done(nil)
		} else {
			c.lock.e.EndTurn(c.lock.queue, c)
			free = append(free, freeing{e, &errs[i]})
		}
	}

	if len(apart) == 0 && len(tasks) == 0 && len(free) > 0 && joined(free) == len(free) {
		releaseFree(free)
		return errs
	}

	for _, i := range apart {
		tasks = append(tasks, func() { errs[i] = holds[i].Unlock(ctx) })
	}
	for len(free) > 0 {
		batch := free[:joined(free)]
		tasks = append(tasks, func() { releaseFree(batch) })
		free = free[len(batch):]
	}
	atOnce(tasks)
	return errs
}

// joined returns how many of the claims, counted from the first, one script can release.
func joined(free []freeing) int {
	n := 1
	for n < min(len(free), maxTogether) && free[n].claim.lock.joins(free[0].claim.lock) {
		n++
	}
	return n
}

// GiveBack is UnlockTogether for holds that no caller has. It also releases those that were
// lost only because their client is closing.
func GiveBack(ctx context.Context, holds []GroupHold) []error {
	errs := UnlockTogether(ctx, holds)
	for _, one := range holds {
		h := one.One()
		if h == nil {
			continue
		}
		if loss := h.Loss(); loss != nil && loss.Reason == lock.ReasonClosed {
			h.claim.lock.releaseUnknown(h.claim.Claim, false)
		}
	}

	return errs
}

// atOnce runs tasks at once.
func atOnce(tasks []func()) {
	switch len(tasks) {
	case 0:
		return
	case 1:
		tasks[0]()
		return
	}

	var done sync.WaitGroup
	for _, task := range tasks {
		done.Go(task)
	}
	done.Wait()
}

// freeing is the release of a claim.
type freeing struct {
	ending
	err *error // its result
}

// releaseFree releases claims with one script.
func releaseFree(free []freeing) {
	first := free[0]
	if len(free) == 1 {
		first.alone(false)
		return
	}

	claims := make([]PendingRelease, len(free))
	for i, f := range free {
		claims[i] = PendingRelease{&f.claim.Claim, f.claim.lock.p.Channel(&f.claim.Claim)}
	}
	l := first.claim.lock
	freed, err := l.kind.Batched.ReleaseEach(first.ctx, claims)
	var rest []int // to be released one by one
	for i, f := range free {
		c := f.claim
		if err != nil || freed[i].State == Unreleased {
			rest = append(rest, i)
			continue
		}
		l.e.Released(c.lock.queue, c, Release{Receivers: freed[i].Receivers})
		*f.err = f.done(c.releaseError(freed[i], nil))
	}

	releaseRest(free, rest, wire.IsUnknown(err))
}

// releaseRest releases those claims one by one, at once.
func releaseRest(free []freeing, rest []int, mayHaveRun bool) {
	var tasks []func()
	for _, i := range rest {
		tasks = append(tasks, func() { free[i].alone(mayHaveRun) })
	}
	atOnce(tasks)
}

// alone releases the claim by itself.
func (f freeing) alone(mayHaveRun bool) {
	*f.err = f.done(f.claim.release(f.ctx, f.by, false, mayHaveRun))
}

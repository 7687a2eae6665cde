package multilock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/lock"
)

// grace is how long Unlock waits for servers slower than the majority, so that the next
// caller finds all members free.
const grace = 2 * time.Millisecond

// Unlock implements lock.Hold.
func (h *redHold) Unlock(ctx context.Context) error {
	h.lease.Check()
	if err := h.End("Unlock", h.Name()); err != nil {
		if errors.Is(err, lock.ErrLost) {
			h.undo(context.WithoutCancel(ctx))
		}
		return err
	}
	h.lease.Forget()
	ctx, released := h.StartRelease(ctx)
	return h.Released(released, h.pass(ctx))
}

// pass hands the members to the next local waiter if it can take them over, and otherwise
// releases them.
func (h *redHold) pass(ctx context.Context) error {
	var batch *locking.Batch
	passed := h.r.queues().Pass(h.key(), h, func(next *redHold) bool {
		if !h.canPassTo(next) {
			return false
		}
		batch = h.cohort.Enqueue()
		next.ballot, next.cohort = h.ballot, h.cohort
		next.sent, _ = h.cohort.Trusted()
		return true
	})
	if passed {
		h.Span.HandOff(ctx)
		return h.confirm(ctx, batch)
	}
	receivers, err := h.release(ctx)
	h.r.queues().Released(h.key(), h, acquire.Release{Receivers: receivers})
	return err
}

// canPassTo reports whether the next waiter can take over the members.
func (h *redHold) canPassTo(next *redHold) bool {
	if !h.passable.Load() || !next.passable.Load() {
		return false
	}
	if h.cohort == nil {
		h.cohort = locking.NewCohort(h.sent)
	}
	_, ok := h.cohort.Trusted()
	return ok
}

// confirm asks the members whether they were still held when they were passed on. Without
// a majority, the hold that has them now is lost too.
func (h *redHold) confirm(ctx context.Context, batch *locking.Batch) error {
	err := h.cohort.Confirm(batch, func() error {
		err := locking.Insist(h.r.s, func() error {
			return extendMajorities(ctx, []*redHold{h}, h.ttl, true)[0]
		}, func(err error) bool { return errors.Is(err, lock.ErrLost) || h.fewAway(err) })
		if err != nil && !errors.Is(err, lock.ErrLost) {
			err = fmt.Errorf("redlatch: unlock %q: %w", h.Name(), err)
		}
		return err
	})
	if h.fewAway(err) {
		return nil
	}
	if errors.Is(err, lock.ErrLost) {
		for _, other := range h.r.queues().Holders(h.key()) {
			if other.ballot == h.ballot {
				other.Lost(lock.ReasonGone, nil)
			}
		}
	}
	return err
}

// fewAway reports whether err means only that a minority of the servers is unavailable.
// Unlock does not wait for these, and the lock need not be lost. Without a confirmation it
// is not passed on.
func (h *redHold) fewAway(err error) bool {
	return h.r.s.Err() == nil && errors.Is(err, errMinorityAway)
}

// undo releases the members of a lost hold in the background. Holds that passed the
// members on get their answers first.
func (h *redHold) undo(ctx context.Context) {
	if h.cohort == nil {
		h.ballot.release(ctx)
		return
	}
	release := func(context.Context) { _, _ = h.release(ctx) }
	if !h.r.s.Go(release) {
		release(ctx) // clients of members may still be open
	}
}

// release releases all members, and answers for the holds that have passed them on. receivers
// is as in acquire.Release.
func (h *redHold) release(ctx context.Context) (receivers int, err error) {
	err = h.cohort.Release(func() (err error) {
		receivers, err = h.releaseAll(ctx)
		return err
	})
	return receivers, err
}

// releaseAll releases all members and returns when a majority of the servers is free.
func (h *redHold) releaseAll(ctx context.Context) (receivers int, err error) {
	if h.cohort != nil {
		h.awaitLate()
	}
	t := h.ballot.release(ctx)
	free := func() int { return len(h.r.members) - t.open - len(t.errs) }
	held := t.open
	t.wait(ctx, func() bool { return free() >= h.r.quorum })
	others, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	t.wait(others, nil)
	receivers = t.receivers
	if h.r.channel == "" || t.counted < len(h.r.members) {
		receivers = -1 // not every member has counted the waiters of this lock
	}
	switch err := errors.Join(t.errs...); {
	case held-t.gone < h.r.quorum:
		return receivers, h.loss(lock.ReasonGone, err)
	case free() < h.r.quorum:
		return receivers, fmt.Errorf("%w: unlock %q: %w", lock.ErrIndeterminate, h.Name(), err)
	}
	return receivers, nil
}

// awaitLate waits briefly for pending answers of members. A member granted after the
// release of the others would split the votes of the next contenders. Only a hold of a
// cohort waits, because only such a lock is known to have contenders.
func (h *redHold) awaitLate() {
	limit := time.After(grace)
	for h.ballot.count().open > 0 {
		select {
		case <-h.ballot.changed:
		case <-limit:
			return
		}
	}
}

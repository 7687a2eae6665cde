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
	if err := h.end(); err != nil {
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
		next.round, next.cohort = h.round, h.cohort
		next.sent, _ = h.cohort.Trusted()
		return true
	})
	if !passed {
		return h.release(ctx)
	}
	h.Span.HandOff(ctx)
	return h.confirm(ctx, batch)
}

// canPassTo reports whether the next waiter can take over the members.
func (h *redHold) canPassTo(next *redHold) bool {
	if !h.plain() || !next.plain() || h.extended.Load() {
		return false
	}
	if h.cohort == nil {
		h.cohort = locking.NewCohort(h.sent)
	}
	_, ok := h.cohort.Trusted()
	return ok
}

// plain reports whether the hold has no named owner, is renewed and is exclusive.
func (h *redHold) plain() bool { return h.callerOwner.IsZero() && !h.fixed && !h.r.shared }

// confirm asks the members whether they were still held when they were passed on. Without
// a majority, the hold that has them now is lost too.
func (h *redHold) confirm(ctx context.Context, batch *locking.Batch) error {
	err := h.cohort.Confirm(batch, func() error {
		err := locking.Insist(h.r.s, func() error {
			return extendMajorities(ctx, []*redHold{h}, h.ttl, true, true)[0]
		}, func(err error) bool { return errors.Is(err, lock.ErrLost) || h.fewAway(err) })
		if err != nil && !errors.Is(err, lock.ErrLost) {
			err = fmt.Errorf("redlatch: unlock %q: %w", h.r.info.Name, err)
		}
		return err
	})
	if h.fewAway(err) {
		return nil
	}
	if errors.Is(err, lock.ErrLost) {
		for _, other := range h.r.queues().Holders(h.key()) {
			if other.round == h.round {
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
	unconfirmed := (*unconfirmedError)(nil)
	return h.r.s.Err() == nil && errors.As(err, &unconfirmed) && unconfirmed.away <= len(h.votes)-h.r.quorum
}

// release releases the members.
func (h *redHold) release(ctx context.Context) (err error) {
	how := acquire.Release{}
	err = h.cohort.Release(func() (err error) {
		how.Receivers, err = h.releaseAll(ctx)
		return err
	})
	h.r.queues().Released(h.key(), h, how)
	return err
}

// undo releases the members of a lost hold in the background. Holds that passed the
// members on get their answers first.
func (h *redHold) undo(ctx context.Context) {
	if h.cohort == nil {
		h.releaseEach(ctx, h.take())
		return
	}
	h.close()
	release := func(context.Context) {
		_ = h.cohort.Release(func() error {
			_, err := h.releaseAll(ctx)
			return err
		})
	}
	if !h.r.s.Go(release) {
		release(ctx) // clients of members may still be open
	}
}

// released is the result of the release of a member.
type released struct {
	err       error
	receivers int
}

// releaseEach releases the n members that are held, in the background. results has capacity
// for all. Members of a client that is closing are released before it returns.
func (h *redHold) releaseEach(ctx context.Context, votes []vote) (results chan released, n int) {
	results = make(chan released, len(votes))
	for i, v := range votes {
		if v.hold == nil {
			continue
		}
		n++
		unlock := func(context.Context) {
			err := v.hold.Unlock(ctx)
			results <- released{err, v.hold.Receivers()}
		}
		// The member's client runs the task, because the Redlock's client may close first.
		if !h.r.members[i].Session().Go(unlock) {
			defer unlock(ctx)
		}
	}
	return results, n
}

// releaseAll releases all members and returns when a majority of the servers is free.
// receivers is the number of subscribers that received the messages, or negative if it is
// not known for all members.
func (h *redHold) releaseAll(ctx context.Context) (receivers int, err error) {
	if h.cohort != nil {
		h.awaitLate()
	}
	results, n := h.releaseEach(ctx, h.take())
	var (
		errs          []error
		gone, answers int
		free          = len(h.votes) - n
		uncounted     = h.r.channel == ""
		waitForOthers <-chan time.Time
	)
	for ; answers < n; answers++ {
		if free >= h.r.quorum && waitForOthers == nil {
			waitForOthers = time.After(grace)
		}
		select {
		case res := <-results:
			switch {
			case isGone(res.err):
				gone++
				free++
			case res.err != nil:
				errs = append(errs, res.err)
			default:
				free++
				receivers += res.receivers
				uncounted = uncounted || res.receivers < 0
			}
			continue
		case <-waitForOthers:
		}
		break
	}
	if uncounted || answers < len(h.votes) || len(errs) > 0 {
		receivers = -1 // not every member has counted the waiters of this lock
	}
	switch err := errors.Join(errs...); {
	case n-gone < h.r.quorum:
		return receivers, h.gone(err)
	case free < h.r.quorum:
		return receivers, fmt.Errorf("%w: unlock %q: %w", lock.ErrIndeterminate, h.r.info.Name, err)
	}
	return receivers, nil
}

// gone returns the error of a hold that too few servers have.
func (h *redHold) gone(err error) error {
	return &lock.LostError{Name: h.r.info.Name, Owner: h.owner, Reason: lock.ReasonGone, When: time.Now(), Err: err}
}

// awaitLate waits briefly for pending answers of members. A member granted after the
// release of the others would split the votes of the next contenders. Only a hold of a
// cohort waits, because only such a lock is known to have contenders.
func (h *redHold) awaitLate() {
	limit := time.After(grace)
	for _, _, open := h.count(); open > 0; _, _, open = h.count() {
		select {
		case <-h.changed:
		case <-limit:
			return
		}
	}
}

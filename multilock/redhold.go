package multilock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

const (
	leastTimeout = 50 * time.Millisecond // of the wait for one server
	// grace is how long Unlock waits for servers slower than the majority, so that the next
	// caller finds all members free.
	grace = 2 * time.Millisecond
	// maxRenewal bounds the wait for one server during a renewal. A majority may answer long
	// before.
	maxRenewal = 2 * time.Second
)

// Unlock implements lock.Hold.
func (h *redHold) Unlock(ctx context.Context) error {
	h.Lease.Check()
	if err := h.End("release", h.Object()); err != nil {
		if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
			if lost.Reason == lock.ReasonMaxHold { // the servers have it for sure, and most likely answer
				_, _ = h.release(context.WithoutCancel(ctx), time.Now().Add(engine.UnlockTimeout))
			} else {
				h.undo(context.WithoutCancel(ctx))
			}
		}
		return err
	}

	h.Lease.Forget()
	for i := range h.r.members {
		if member := h.round.hold(i); member != nil {
			member.KeepUntil(h.keepUntil)
		}
	}

	ctx, released := h.StartRelease(ctx)
	began := time.Now()
	return h.Released(released, h.r.failed(ctx, "release", began, h.pass(ctx, began.Add(engine.UnlockTimeout))))
}

// pass hands the members to the next local waiter if that can take them over, and otherwise
// releases them.
func (h *redHold) pass(ctx context.Context, by time.Time) error {
	var batch *engine.Batch
	passed := h.r.queues().Pass(h.r.key, h, func(waiter engine.Acquirer) bool {
		next := waiter.(*redHold)
		if !h.passable.Load() || !next.passable.Load() {
			return false
		}
		if h.cohort == nil {
			h.cohort = engine.NewCohort(h.sent)
		}
		sent, trusted := h.cohort.Valid()
		if trusted {
			batch = h.cohort.Enqueue(by)
			next.round = h.round
			next.cohort = h.cohort
			next.sent = sent
		}
		return trusted
	})
	if passed {
		h.r.s.Telemetry.HandedOver(ctx, h.r.info, 1)
		return h.confirm(ctx, batch)
	}
	if h.r.queues().Waited(h.r.key) {
		// The waiters of a member that is not released are unknown, and those here would pause for
		// them.
		h.round.settle(grace)
	}
	receivers, err := h.release(ctx, by)
	h.r.queues().Released(h.r.key, h, engine.Release{Receivers: receivers})
	return err
}

// confirm asks the members whether they were still held when they were passed on. Without
// a majority, the hold that has them now is lost too. If only a minority is unavailable, Unlock
// does not wait for it, and the lock is neither lost nor passed on.
func (h *redHold) confirm(ctx context.Context, batch *engine.Batch) error {
	err := h.cohort.Confirm(batch, func(by time.Time) error {
		return engine.RetryUntil(ctx, by, h.r.s, func(ctx context.Context) error {
			return extendMajorities(ctx, []*redHold{h}, h.ttl, true)[0]
		}, func(err error) bool { return errors.Is(err, lock.ErrLost) || errors.Is(err, errMinorityAway) })
	})
	if err == nil || errors.Is(err, errMinorityAway) {
		return nil
	}
	if !errors.Is(err, lock.ErrLost) {
		return err
	}

	for _, other := range engine.As[*redHold](h.r.queues().Holders(h.r.key)) {
		if other.round == h.round {
			other.Lost(lock.ReasonGone, nil)
		}
	}

	return err
}

// undo releases the members of a lost hold in the background. Holds that passed the
// members on get their answers first.
func (h *redHold) undo(ctx context.Context) {
	if h.cohort == nil {
		h.round.release(ctx)
		return
	}
	release := func(context.Context) { _, _ = h.release(ctx, time.Now().Add(engine.UnlockTimeout)) }
	if !h.r.s.Go(release) {
		release(ctx) // clients of members may still be open
	}
}

// release releases all members and returns when a majority of the servers is free. It answers
// for the holds that have passed them on. receivers is as in engine.Release.
func (h *redHold) release(ctx context.Context, by time.Time) (receivers int, err error) {
	err = h.cohort.Release(by, func(by time.Time) error {
		t := h.round.release(ctx)
		free := func() int { return len(h.r.members) - t.open - t.asking - len(t.errs) }
		held := t.open
		limit := time.NewTimer(time.Until(by)) // ctx does not end
		defer limit.Stop()
		wait(t, limit.C, func() bool { return free() >= h.r.quorum })
		if t.open > 0 {
			limit.Reset(min(grace, time.Until(by)))
			wait(t, limit.C, nil)
		}
		receivers = t.receivers
		if h.r.channel == "" || t.counted < len(h.r.members) {
			receivers = -1 // not every member has counted the waiters of this lock
		}
		err := errors.Join(t.errs...)
		if held-t.gone < h.r.quorum {
			return h.loss(lock.ReasonGone, err)
		}
		if free() < h.r.quorum && t.open+t.asking == 0 && !errors.Is(err, lock.ErrIndeterminate) {
			return err // every server has answered, and too few have released their members
		}
		if free() < h.r.quorum {
			return errors.Join(lock.ErrIndeterminate, err)
		}
		return nil
	})
	return receivers, err
}

// redRenewer renews the holds of Redlocks.
type redRenewer struct{}

// Renew implements watchdog.Renewer. It also requests missing members. It applies the results
// itself, because the watchdog ignores Held if a batch has an error.
func (redRenewer) Renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, shared bool) []watchdog.Renewed {
	var holds []*redHold
	for _, l := range slices.Concat(batches...) {
		holds = append(holds, l.Holder.(*redHold))
	}
	sent := time.Now()
	errs := extendMajorities(ctx, holds, holds[0].ttl, shared)
	results := make([]watchdog.Renewed, len(batches))
	for b, batch := range batches {
		for range batch {
			h := holds[0]
			err := errs[0]
			holds = holds[1:]
			errs = errs[1:]
			results[b].Held = append(results[b].Held, err == nil)
			if err == nil {
				h.Lease.Extended(sent, ttl)
			} else if errors.Is(err, lock.ErrLost) {
				h.Lost(lock.ReasonGone, nil)
			} else {
				results[b].Err = err
			}
			if h.Held() {
				// After Extend the other members have a longer lease.
				h.round.askMissing(h.Context(), max(h.ttl, h.Lease.Remaining()))
			}
		}
	}

	return results
}

// extendMajorities extends the leases of the members of holds, which belong to one client,
// to at least lease from now. It returns one error for each hold as soon as all are decided or
// ctx is done: nil if a majority has confirmed the hold, an error that matches lock.ErrLost if
// no majority can.
func extendMajorities(ctx context.Context, holds []*redHold, lease time.Duration, shared bool) []error {
	s := holds[0].r.s
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer s.OnClose(cancel)() // which ends the holds

	var members []engine.MemberHold
	var answered []func(err error)
	tallies := make([]*tally, len(holds))
	for n, h := range holds {
		t := &tally{answers: make(chan answer, len(h.r.members))}
		tallies[n] = t
		for i := range h.r.members {
			hold := h.round.hold(i)
			if hold == nil {
				continue
			}
			t.open++
			members = append(members, hold)
			answered = append(answered, func(err error) {
				if isGone(err) {
					h.round.drop(context.Background(), i, hold, nil, false) // the server may still have it
				}
				t.answers <- answer{i: i, err: err}
			})
		}
	}

	limit := min(maxRenewal, lease)
	if by, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(by))
	}
	s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		engine.ExtendTogether(ctx, members, lease, shared, func(n int, err error) { answered[n](err) })
	})
	errs := make([]error, len(holds))
	for n, h := range holds {
		t := tallies[n]
		wait(t, ctx.Done(), func() bool { return t.yes >= h.r.quorum || t.yes+t.away() < h.r.quorum })
		errs[n] = h.confirmed(t)
	}

	return errs
}

// errMinorityAway is part of the result if only a minority of the servers has not answered.
var errMinorityAway = errors.New("a minority of the servers is unavailable")

// confirmed returns nil if a majority has confirmed the hold.
func (h *redHold) confirmed(t *tally) error {
	if t.yes >= h.r.quorum {
		return nil
	}
	if t.yes+t.away() < h.r.quorum {
		return h.loss(lock.ReasonGone, nil)
	}

	errs := append(t.errs, errors.New("not confirmed by a majority"))
	if h.r.s.Err() == nil && t.away() <= len(h.r.members)-h.r.quorum {
		errs = append(errs, errMinorityAway)
	}
	return errors.Join(errs...)
}

// tally counts the answers of the members of a hold to a request.
type tally struct {
	answers            chan answer // has capacity for all
	open, yes, gone    int
	errs               []error // of the others
	receivers, counted int     // of a release, and the members whose receivers are known
	// asking counts the members that had not answered the acquisition when the release began, until
	// they are refused, or granted and then released.
	asking int
}

// answer is the answer of member i.
type answer struct {
	i         int
	err       error
	receivers int
	late      bool // the member is one that asking has counted
}

// wait counts answers until all have arrived, enough reports true unless it is nil, or over says that
// the time is over. Then it counts those that are there. With enough it also waits for members that are
// still being asked.
func wait[T any](t *tally, over <-chan T, enough func() bool) {
	for t.open+t.asking > 0 && (enough == nil && t.open > 0 || enough != nil && !enough()) {
		select {
		case a := <-t.answers:
			t.count(a)
		case <-over:
			for len(t.answers) > 0 {
				t.count(<-t.answers)
			}
			return
		}
	}
}

func (t *tally) count(a answer) {
	if a.late {
		t.asking--
		if a.err != nil && !isTaken(a.err) && !isGone(a.err) {
			t.errs = append(t.errs, serverError{a.i, a.err})
		}
		return
	}

	t.open--
	if isGone(a.err) {
		t.gone++
	} else if a.err != nil {
		t.errs = append(t.errs, serverError{a.i, a.err})
	} else {
		t.yes++
		if a.receivers >= 0 {
			t.receivers += a.receivers
			t.counted++
		}
	}
}

// away returns the number of servers that have not answered, or not with yes or no.
func (t *tally) away() int { return t.open + len(t.errs) }

// isGone reports whether err says that a server no longer has the hold of its member.
func isGone(err error) bool { return errors.Is(err, lock.ErrLost) || errors.Is(err, lock.ErrNotHeld) }

// Remaining implements lock.Hold.
func (h *redHold) Remaining() time.Duration {
	if !h.Held() { // the lease of a lost hold ends after its context
		return 0
	}
	return h.Lease.Remaining()
}

// Extend implements lock.Hold.
func (h *redHold) Extend(ctx context.Context, lease time.Duration) error {
	h.Lease.Check()
	h.passable.Store(false) // before the state is read, because Unlock reads it after that
	if err := h.Err("extend", h.Object()); err != nil {
		return err
	}

	sent := time.Now()
	err := extendMajorities(ctx, []*redHold{h}, lease, true)[0]
	if err == nil {
		h.Lease.Extended(sent, lease-drift(lease))
	} else if errors.Is(err, lock.ErrLost) {
		h.Lost(lock.ReasonGone, nil)
	}
	return cmp.Or(h.Err("extend", h.Object()), h.r.failed(ctx, "extend", sent, err))
}

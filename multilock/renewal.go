package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// redRenewer renews the holds of Redlocks.
type redRenewer struct{}

// maxRenewal bounds the wait for one server during a renewal. A majority may answer long
// before.
const maxRenewal = 2 * time.Second

// Renew implements watchdog.Renewer.
func (redRenewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, shared bool) []watchdog.Renewed {
	var holds []*redHold
	for _, batch := range batches {
		for _, l := range batch {
			holds = append(holds, l.Holder().(*redHold))
		}
	}
	sent := time.Now()
	errs := extendMajorities(ctx, holds, holds[0].ttl, shared)
	results := make([]watchdog.Renewed, len(batches))
	for b, batch := range batches {
		r := &results[b]
		for i, l := range batch {
			r.Held = append(r.Held, errs[i] == nil)
			switch { // here, because the watchdog ignores Held if a batch has an error
			case errs[i] == nil:
				l.Extended(sent, ttl)
			case errors.Is(errs[i], lock.ErrLost):
				l.Holder().Lost(lock.ReasonGone, nil)
			default:
				r.Err = errs[i]
			}
		}
		errs = errs[len(batch):]
	}
	for _, h := range holds {
		h.reacquire()
	}
	return results
}

// reacquire requests the missing members in the background.
func (h *redHold) reacquire() {
	var missing []int
	h.ballot.mu.Lock()
	if h.Held() { // the ballot of a hold that has ended is closed after this
		for i := range h.ballot.votes {
			if v := &h.ballot.votes[i]; v.hold == nil && !v.asking {
				v.asking = true
				missing = append(missing, i)
			}
		}
	}
	h.ballot.mu.Unlock()
	// After Extend the other members have a longer lease.
	lease := max(h.ttl, h.lease.Remaining())
	for _, i := range missing {
		h.ballot.ask(context.WithoutCancel(h.Context()), i, lease)
	}
}

// extendMajorities extends the leases of the members of holds, which belong to one client,
// to at least lease from now. It sends the members of all holds that share a client in one
// batch. It returns one error for each hold as soon as all are decided or ctx is done: nil if
// a majority has confirmed the hold, an error that matches lock.ErrLost if no majority can.
func extendMajorities(ctx context.Context, holds []*redHold, lease time.Duration, shared bool) []error {
	s := holds[0].r.s
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer s.OnClose(cancel)()
	batches := make(map[*session.Session][]extension)
	tallies := make([]*tally, len(holds))
	for n, h := range holds {
		t := newTally(h.r)
		tallies[n] = t
		for i, hold := range h.ballot.held() {
			if hold != nil {
				member := h.r.members[i].Session()
				batches[member] = append(batches[member], extension{h, t, i, hold})
				t.open++
			}
		}
	}
	for _, batch := range batches {
		extend := func(ctx context.Context) { extendMembers(ctx, batch, lease, shared) }
		if !s.Go(extend) {
			break // the client is closing, which ends its holds
		}
	}
	errs := make([]error, len(holds))
	for n, h := range holds {
		t := tallies[n]
		t.wait(ctx, func() bool { return t.yes >= h.r.quorum || t.yes+t.away() < h.r.quorum })
		errs[n] = h.confirmed(t)
	}
	return errs
}

// extension is a request to extend the lease of member i of a hold.
type extension struct {
	h     *redHold
	tally *tally
	i     int
	hold  locking.MemberHold
}

// extendMembers extends the leases of members that share a client.
func extendMembers(ctx context.Context, batch []extension, lease time.Duration, shared bool) {
	ctx, cancel := context.WithTimeout(ctx, max(leastTimeout, min(maxRenewal, lease/6)))
	defer cancel()
	held := make([]locking.MemberHold, len(batch))
	for j, e := range batch {
		held[j] = e.hold
	}
	first := batch[0]
	for j, err := range first.h.r.members[first.i].ExtendMembers(ctx, held, lease, shared) {
		e := batch[j]
		if isGone(err) {
			e.h.ballot.drop(ctx, e.i, e.hold, nil) // the server may still have it
		}
		e.tally.answers <- answer{i: e.i, err: err}
	}
}

// errMinorityAway is part of the result if only a minority of the servers has not answered.
var errMinorityAway = errors.New("a minority of the servers is unavailable")

// confirmed returns nil if a majority has confirmed the hold.
func (h *redHold) confirmed(t *tally) error {
	switch {
	case t.yes >= h.r.quorum:
		return nil
	case t.yes+t.away() < h.r.quorum:
		return h.loss(lock.ReasonGone, nil)
	}
	errs := append(t.errs, fmt.Errorf("redlatch: extend %q: not confirmed by a majority", h.Name()))
	if t.away() <= len(h.r.members)-h.r.quorum {
		errs = append(errs, errMinorityAway)
	}
	return errors.Join(errs...)
}

// tally counts the answers of the members of a hold to a request.
type tally struct {
	answers         chan answer // has capacity for all
	open, yes, gone int
	errs            []error // of the others
	receivers       int     // of a release
	counted         int     // the members whose receivers are known
}

// answer is the answer of member i.
type answer struct {
	i         int
	err       error
	receivers int
}

func newTally(r *Red) *tally { return &tally{answers: make(chan answer, len(r.members))} }

// wait counts answers until all have arrived, enough reports true unless it is nil, or ctx is
// done.
func (t *tally) wait(ctx context.Context, enough func() bool) {
	for t.open > 0 && (enough == nil || !enough()) {
		select {
		case a := <-t.answers:
			t.count(a)
		case <-ctx.Done():
			for len(t.answers) > 0 {
				t.count(<-t.answers)
			}
			return
		}
	}
}

func (t *tally) count(a answer) {
	t.open--
	switch {
	case isGone(a.err):
		t.gone++
	case a.err != nil:
		t.errs = append(t.errs, fmt.Errorf("server %d: %w", a.i+1, a.err))
	default:
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

// Extend implements lock.Hold.
func (h *redHold) Extend(ctx context.Context, lease time.Duration) error {
	h.lease.Check()
	h.passable.Store(false) // before the state is read, because Unlock reads it after that
	if err := h.Err("Extend", h.Name()); err != nil {
		return err
	}
	sent := time.Now()
	err := extendMajorities(ctx, []*redHold{h}, lease, true)[0]
	switch {
	case err == nil:
		h.lease.Extended(sent, lease-drift(lease))
	case errors.Is(err, lock.ErrLost):
		h.Lost(lock.ReasonGone, nil)
	case ctx.Err() != nil:
		err = errors.Join(err, context.Cause(ctx))
	}
	return cmp.Or(h.Err("Extend", h.Name()), err)
}

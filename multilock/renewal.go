package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

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
	batches := make(map[*session.Session][]extension)
	tallies := make([]*tally, len(holds))
	for n, h := range holds {
		t := &tally{h: h}
		tallies[n] = t
		t.decided, t.decide = context.WithCancel(ctx)
		for i, hold := range h.ballot.held() {
			if hold != nil {
				s := h.r.members[i].Session()
				batches[s] = append(batches[s], extension{t, i, hold})
				t.open++
			}
		}
	}
	for _, batch := range batches {
		extend := func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, max(leastTimeout, min(maxRenewal, lease/6)))
			defer cancel()
			held := make([]memberHold, len(batch))
			for j, e := range batch {
				held[j] = e.hold
			}
			first := batch[0]
			for j, err := range first.h.r.members[first.i].Extend(ctx, held, lease, shared) {
				batch[j].answered(ctx, err)
			}
		}
		if !holds[0].r.s.Go(extend) {
			break // the client is closing, which ends its holds
		}
	}
	errs := make([]error, len(tallies))
	for n, t := range tallies {
		if t.undecided() {
			select {
			case <-t.decided.Done(): // or ctx is
			case <-holds[0].r.s.Done():
			}
		}
		t.decide()
		errs[n] = t.result()
	}
	return errs
}

// extension is a request to extend the lease of member i of a hold.
type extension struct {
	*tally
	i    int
	hold memberHold
}

// answered counts the answer of the member's server.
func (e extension) answered(ctx context.Context, err error) {
	if isGone(err) {
		e.h.ballot.drop(ctx, e.i, e.hold, nil) // the server may still have it
	}
	e.mu.Lock()
	e.open--
	switch {
	case err == nil:
		e.yes++
	case !isGone(err):
		e.errs = append(e.errs, fmt.Errorf("server %d: %w", e.i+1, err))
	}
	e.mu.Unlock()
	if !e.undecided() {
		e.decide()
	}
}

// isGone reports whether err says that a server no longer has the hold of its member.
func isGone(err error) bool { return errors.Is(err, lock.ErrLost) || errors.Is(err, lock.ErrNotHeld) }

// tally counts the answers of the members of a hold.
type tally struct {
	h       *redHold
	decided context.Context // done once no other answer matters
	decide  context.CancelFunc

	mu        sync.Mutex
	yes, open int
	errs      []error // except those of lost members
}

// errMinorityAway is part of the result if only a minority of the servers has not answered.
var errMinorityAway = errors.New("a minority of the servers is unavailable")

// undecided reports whether another answer matters.
func (t *tally) undecided() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.h.r.quorum
	return t.open > 0 && t.yes < q && t.yes+t.open+len(t.errs) >= q
}

// result returns nil if a majority has confirmed the hold.
func (t *tally) result() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, away := t.h.r, t.open+len(t.errs)
	switch {
	case t.yes >= r.quorum:
		return nil
	case t.yes+away < r.quorum:
		return t.h.loss(lock.ReasonGone, nil)
	}
	errs := append(slices.Clone(t.errs), fmt.Errorf("redlatch: extend %q: not confirmed by a majority", r.info.Name))
	if away <= len(r.members)-r.quorum {
		errs = append(errs, errMinorityAway)
	}
	return errors.Join(errs...)
}

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

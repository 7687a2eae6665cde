package multilock

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	errs := extendMajorities(ctx, holds, holds[0].ttl, shared, false)
	results := make([]watchdog.Renewed, len(batches))
	for b, batch := range batches {
		r := &results[b]
		for i := range batch {
			r.Held = append(r.Held, errs[i] == nil)
			if errs[i] != nil && !errors.Is(errs[i], lock.ErrLost) {
				r.Err = errs[i]
			}
		}
		for i, l := range batch {
			switch { // the watchdog ignores Held if a batch has an error
			case r.Err == nil:
			case r.Held[i]:
				l.Extended(sent, ttl)
			case errors.Is(errs[i], lock.ErrLost):
				l.Holder().Lost(lock.ReasonGone, nil)
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
	h.votesMu.Lock()
	number := h.number
	over := h.current("") != nil // the end of a hold takes its votes after this
	for i := range h.votes {
		if over {
			break
		}
		if v := &h.votes[i]; v.hold == nil && !v.asking {
			v.asking = true
			missing = append(missing, i)
		}
	}
	h.votesMu.Unlock()
	// After Extend the other members have a longer lease.
	lease := max(h.ttl, h.lease.Remaining())
	for _, i := range missing {
		h.ask(context.WithoutCancel(h.ctx), i, number, lease)
	}
}

// drop forgets a lost member.
func (rd *round) drop(i int, hold *memberHold) {
	rd.votesMu.Lock()
	ours := rd.votes[i].hold == hold
	if ours {
		rd.votes[i].hold = nil
	}
	rd.votesMu.Unlock()
	if !ours {
		return // it is being released
	}
	// The server may still have it.
	rd.r.inBackground(i, func(ctx context.Context) { _ = hold.Unlock(ctx) })
}

// member is a member of one of several holds.
type member struct {
	of   int // the index of the hold
	i    int // the index of the member
	hold *memberHold
}

// extendMajorities extends the leases of the members of holds, which belong to one client,
// to at least lease from now. It sends the members of all holds that share a client in one
// batch. It returns one error for each hold as soon as all are decided or ctx is done: nil if
// a majority has confirmed the hold, an error that matches lock.ErrLost if no majority can.
// With all set, it waits for every answer if no majority is possible.
func extendMajorities(ctx context.Context, holds []*redHold, lease time.Duration, shared, all bool) []error {
	type target struct {
		s        *session.Session
		separate int // distinguishes members of other modules
	}
	batches := make(map[target][]member)
	t := tallies{holds: holds, all: all, each: make([]tally, len(holds)), changed: make(chan struct{}, 1)}
	for of, h := range holds {
		h.votesMu.Lock()
		for i, v := range h.votes {
			if v.hold == nil {
				continue
			}
			to := target{}
			if l := h.r.known[i]; l != nil {
				to.s = l.Session()
			} else {
				to.separate = len(batches) + 1
			}
			batches[to] = append(batches[to], member{of, i, v.hold})
			t.each[of].open++
		}
		h.votesMu.Unlock()
	}
	for _, members := range batches {
		extend := func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, max(leastTimeout, min(maxRenewal, lease/6)))
			defer cancel()
			memberHolds := make([]lock.Hold, len(members))
			for j, m := range members {
				memberHolds[j] = m.hold.Hold
			}
			t.add(members, locking.ExtendTogether(ctx, memberHolds, lease, shared))
		}
		if !holds[0].r.s.Go(extend) {
			break // the client is closing, which ends its holds
		}
	}
	for !t.decided() {
		select {
		case <-t.changed:
			continue
		case <-ctx.Done():
		case <-holds[0].r.s.Done():
		}
		break
	}
	return t.errors()
}

// tally counts the answers of the members of a hold.
type tally struct {
	yes, open int
	errs      []error // except those of lost members
}

// unconfirmedError reports that no majority has confirmed a hold. It may still be held,
// because servers have not answered.
type unconfirmedError struct {
	error
	away int // the number of these servers
}

func (e *unconfirmedError) Unwrap() error { return e.error }

// tallies are the tallies of several holds.
type tallies struct {
	holds   []*redHold
	all     bool // wait for every answer even if no majority is possible
	changed chan struct{}

	mu   sync.Mutex
	each []tally
}

// add counts the answers of one server.
func (t *tallies) add(members []member, errs []error) {
	t.mu.Lock()
	for j, m := range members {
		c := &t.each[m.of]
		c.open--
		switch err := errs[j]; {
		case err == nil:
			c.yes++
		case errors.Is(err, lock.ErrLost), errors.Is(err, lock.ErrNotHeld):
			t.holds[m.of].drop(m.i, m.hold)
		default:
			c.errs = append(c.errs, fmt.Errorf("server %d: %w", m.i+1, err))
		}
	}
	t.mu.Unlock()
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// decided reports whether no further answer matters.
func (t *tallies) decided() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for of, c := range t.each {
		if q := t.holds[of].r.quorum; c.yes < q && (c.yes+c.open >= q || t.all && c.open > 0) {
			return false
		}
	}
	return true
}

func (t *tallies) errors() []error {
	t.mu.Lock()
	defer t.mu.Unlock()
	errs := make([]error, len(t.each))
	for of, c := range t.each {
		h := t.holds[of]
		switch {
		case c.yes >= h.r.quorum:
		case c.yes+c.open+len(c.errs) < h.r.quorum:
			errs[of] = &lock.LostError{Name: h.r.info.Name, Owner: h.owner, Reason: lock.ReasonGone, When: time.Now()}
		default:
			errs[of] = &unconfirmedError{
				errors.Join(append(c.errs, fmt.Errorf("redlatch: extend %q: not confirmed by a majority", h.r.info.Name))...), c.open + len(c.errs),
			}
		}
	}
	return errs
}

func (h *redHold) extend(ctx context.Context, lease time.Duration) error {
	h.lease.Check()
	h.extended.Store(true) // before the state is read, because Unlock reads extended after it
	if err := h.current("Extend"); err != nil {
		return err
	}
	sent := time.Now()
	err := extendMajorities(ctx, []*redHold{h}, lease, true, false)[0]
	switch {
	case err == nil:
		h.lease.Extended(sent, lease-drift(lease))
	case errors.Is(err, lock.ErrLost):
		h.Lost(lock.ReasonGone, nil)
	case ctx.Err() != nil:
		err = errors.Join(err, context.Cause(ctx))
	}
	if now := h.current("Extend"); now != nil {
		return now
	}
	return err
}

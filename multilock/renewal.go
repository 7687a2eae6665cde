package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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
	errs := extendMajorities(ctx, holds, holds[0].ttl, shared, false)
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
	h.votesMu.Lock()
	number := h.number
	if h.Held() { // the end of a hold takes its votes after this
		for i := range h.votes {
			if v := &h.votes[i]; v.hold == nil && !v.asking {
				v.asking = true
				missing = append(missing, i)
			}
		}
	}
	h.votesMu.Unlock()
	// After Extend the other members have a longer lease.
	lease := max(h.ttl, h.lease.Remaining())
	for _, i := range missing {
		h.ask(context.WithoutCancel(h.Context()), i, number, lease)
	}
}

// drop forgets a lost member.
func (rd *round) drop(i int, hold memberHold) {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	if rd.votes[i].hold != hold {
		return // it is being released
	}
	rd.votes[i].hold = nil
	// The server may still have it.
	rd.r.members[i].Session().Go(func(ctx context.Context) { _ = hold.Unlock(ctx) })
}

// heldMember is the i-th member of one of several holds.
type heldMember struct {
	*tally
	i    int
	hold memberHold
	err  error // the answer of its server
}

// extendMajorities extends the leases of the members of holds, which belong to one client,
// to at least lease from now. It sends the members of all holds that share a client in one
// batch. It returns one error for each hold as soon as all are decided or ctx is done: nil if
// a majority has confirmed the hold, an error that matches lock.ErrLost if no majority can.
// With all set, it waits for every answer if no majority is possible.
func extendMajorities(ctx context.Context, holds []*redHold, lease time.Duration, shared, all bool) []error {
	batches := make(map[*session.Session][]heldMember)
	tallies := make([]*tally, len(holds))
	open := 0
	for n, h := range holds {
		t := &tally{h: h}
		tallies[n] = t
		h.votesMu.Lock()
		for i, v := range h.votes {
			if v.hold != nil {
				s := h.r.members[i].Session()
				batches[s] = append(batches[s], heldMember{t, i, v.hold, nil})
				t.open++
				open++
			}
		}
		h.votesMu.Unlock()
	}
	answers := make(chan heldMember, open)
	for _, members := range batches {
		extend := func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, max(leastTimeout, min(maxRenewal, lease/6)))
			defer cancel()
			batch := make([]memberHold, len(members))
			for j, m := range members {
				batch[j] = m.hold
			}
			first := members[0]
			for j, err := range first.h.r.members[first.i].Extend(ctx, batch, lease, shared) {
				m := members[j]
				if m.err = err; isGone(err) {
					m.h.drop(m.i, m.hold)
				}
				answers <- m
			}
		}
		if !holds[0].r.s.Go(extend) {
			break // the client is closing, which ends its holds
		}
	}
	for slices.ContainsFunc(tallies, func(t *tally) bool { return t.undecided(all) }) {
		select {
		case m := <-answers:
			m.add(m)
			continue
		case <-ctx.Done():
		case <-holds[0].r.s.Done():
		}
		break
	}
	errs := make([]error, len(tallies))
	for n, t := range tallies {
		errs[n] = t.confirmed()
	}
	return errs
}

// isGone reports whether err says that a server no longer has the hold of its member.
func isGone(err error) bool { return errors.Is(err, lock.ErrLost) || errors.Is(err, lock.ErrNotHeld) }

// tally counts the answers of the members of a hold.
type tally struct {
	h         *redHold
	yes, open int
	errs      []error // except those of lost members
}

func (t *tally) add(m heldMember) {
	t.open--
	switch {
	case m.err == nil:
		t.yes++
	case !isGone(m.err):
		t.errs = append(t.errs, fmt.Errorf("server %d: %w", m.i+1, m.err))
	}
}

// undecided reports whether another answer matters.
func (t *tally) undecided(all bool) bool {
	q := t.h.r.quorum
	return t.yes < q && (t.yes+t.open >= q || all && t.open > 0)
}

// confirmed returns nil if a majority has confirmed the hold.
func (t *tally) confirmed() error {
	r, away := t.h.r, t.open+len(t.errs)
	switch {
	case t.yes >= r.quorum:
		return nil
	case t.yes+away < r.quorum:
		return t.h.gone(nil)
	}
	err := fmt.Errorf("redlatch: extend %q: not confirmed by a majority", r.info.Name)
	return &unconfirmedError{errors.Join(append(t.errs, err)...), away}
}

// unconfirmedError reports that no majority has confirmed a hold. It may still be held,
// because servers have not answered.
type unconfirmedError struct {
	error
	away int // the number of these servers
}

func (e *unconfirmedError) Unwrap() error { return e.error }

// Extend implements lock.Hold.
func (h *redHold) Extend(ctx context.Context, lease time.Duration) error {
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
	return cmp.Or(h.current("Extend"), err)
}

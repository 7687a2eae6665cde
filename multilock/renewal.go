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

// redRenewer renews red locks.
type redRenewer struct{}

// maxRenewal is for how long a server is waited for with a renewal, by itself: there may
// be a majority long before.
const maxRenewal = 2 * time.Second

// Renew implements watchdog.Renewer.
func (redRenewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, detour bool) []watchdog.Renewed {
	var holds []*redHold
	for _, batch := range batches {
		for _, l := range batch {
			holds = append(holds, l.Holder().(*redHold))
		}
	}
	sent := time.Now()
	errs := extendMajorities(ctx, holds, holds[0].ttl, detour, false)
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
			switch { // of a batch with an error the watchdog looks at nothing else
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
		h.topUp()
	}
	return results
}

// topUp asks for the members that are missing, in the background.
func (h *redHold) topUp() {
	var missing []int
	h.votes.Lock()
	round := h.round
	over := h.current("") != nil // known here: who ends the hold takes all members after that
	for i := range h.members {
		if over {
			break
		}
		if m := &h.members[i]; m.part == nil && !m.asking {
			m.asking = true
			missing = append(missing, i)
		}
	}
	h.votes.Unlock()
	// If it was extended, they are to last as long as the others.
	lease := max(h.ttl, h.lease.Remaining())
	for _, i := range missing {
		h.ask(context.WithoutCancel(h.ctx), i, round, lease)
	}
}

// drop forgets a member that is lost.
func (h *redHold) drop(i int, part *redPart) {
	h.votes.Lock()
	ours := h.members[i].part == part
	if ours {
		h.members[i].part = nil
	}
	h.votes.Unlock()
	if !ours {
		return // it is being given back
	}
	// Should the server still keep it.
	h.r.inBackground(i, func(ctx context.Context) { _ = part.Unlock(ctx) })
}

// share is a member of a hold.
type share struct {
	of   int // which of the holds
	i    int // which member
	part *redPart
}

// extendMajorities gives the members of holds of one client at least lease from now.
// Those of different holds that are of one client go together. It returns what became of
// each hold as soon as that is known of all, or ctx ends: nil if a majority has confirmed, an
// error that matches lock.ErrLost if none can. With all set it waits for all if there can
// be no majority.
func extendMajorities(ctx context.Context, holds []*redHold, lease time.Duration, detour, all bool) []error {
	type group struct {
		s     *session.Session
		alone int // a number for each member that is of nobody known
	}
	groups := make(map[group][]share)
	t := tallies{holds: holds, all: all, each: make([]tally, len(holds)), changed: make(chan struct{}, 1)}
	for of, h := range holds {
		h.votes.Lock()
		for i, m := range h.members {
			if m.part == nil {
				continue
			}
			g := group{}
			if l := h.r.known[i]; l != nil {
				g.s = l.Session()
			} else {
				g.alone = len(groups) + 1
			}
			groups[g] = append(groups[g], share{of, i, m.part})
			t.each[of].open++
		}
		h.votes.Unlock()
	}
	for _, shares := range groups {
		extend := func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, max(leastTimeout, min(maxRenewal, lease/6)))
			defer cancel()
			members := make([]lock.Hold, len(shares))
			for j, sh := range shares {
				members[j] = sh.part.Hold
			}
			t.add(shares, locking.ExtendTogether(ctx, members, lease, detour))
		}
		if !holds[0].r.s.Go(extend) {
			break // the client is being closed, and the holds with it
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

// tally is what the members of a hold have answered.
type tally struct {
	yes, open int
	errs      []error // but for members that are gone
}

// unconfirmedError says that no majority has confirmed a hold, which may be held all the
// same by those that are away.
type unconfirmedError struct {
	error
	away int
}

func (e *unconfirmedError) Unwrap() error { return e.error }

// tallies are those of several holds.
type tallies struct {
	holds   []*redHold
	all     bool // who has answered is of interest also if there can be no majority
	changed chan struct{}

	mu   sync.Mutex
	each []tally
}

// add counts the answers of one server.
func (t *tallies) add(shares []share, errs []error) {
	t.mu.Lock()
	for j, sh := range shares {
		c := &t.each[sh.of]
		c.open--
		switch err := errs[j]; {
		case err == nil:
			c.yes++
		case errors.Is(err, lock.ErrLost), errors.Is(err, lock.ErrNotHeld):
			t.holds[sh.of].drop(sh.i, sh.part)
		default:
			c.errs = append(c.errs, fmt.Errorf("server %d: %w", sh.i+1, err))
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
			errs[of] = &lock.LostError{Name: h.r.is.Name, Owner: h.owner, Reason: lock.ReasonGone, When: time.Now()}
		default:
			errs[of] = &unconfirmedError{
				errors.Join(append(c.errs, fmt.Errorf("redlatch: extend %q: no majority has confirmed it", h.r.is.Name))...), c.open + len(c.errs),
			}
		}
	}
	return errs
}

func (h *redHold) extend(ctx context.Context, lease time.Duration) error {
	h.lease.Check()
	h.extended.Store(true) // before it is looked whether it is held: who ends it looks at this
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

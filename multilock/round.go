package multilock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/lock"
)

// minPatience is the least time that a round without a majority waits for more answers once
// a member is held by another owner. That owner may lack the votes collected here, and servers
// that have not answered may be down. The limit doubles with each round, in case they are only
// far away.
const minPatience = 5 * time.Millisecond

// Join implements acquire.Acquirer: the members let their owner re-enter.
func (h *redHold) Join(holder *redHold) (acquire.Relation, error) {
	if holder.owner == h.owner {
		return acquire.Beside, nil
	}
	return acquire.Unrelated, nil
}

// TryAll implements acquire.Acquirer. It is not called: each caller has a ballot of its own.
func (h *redHold) TryAll(context.Context, []*redHold) []acquire.Result { return nil }

// Abandon implements acquire.Acquirer.
func (h *redHold) Abandon() { h.undo(context.Background()) }

// Try implements acquire.Acquirer: it runs one round of the algorithm.
func (h *redHold) Try(ctx context.Context) (acquire.Verdict, error) {
	if pause := time.Until(h.again); pause > 0 {
		// The releases of the last round wake the waiters, which would split the votes again.
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return acquire.Verdict{FreeIn: -1}, nil // the queue reports the reason
		case <-h.r.s.Done():
			return acquire.Verdict{}, lock.ErrClosed
		}
	}
	h.rounds++
	sent := time.Now()
	yes, decided := h.collect(ctx)
	duplicates := h.r.checkServers() // the round has identified servers
	if duplicates == nil && yes >= h.r.quorum && time.Since(sent) < h.ttl-drift(h.ttl) {
		h.sent = sent
		return acquire.Verdict{Acquired: true}, nil
	}
	err := h.undoRound(decided)
	switch {
	case duplicates != nil:
		return acquire.Verdict{}, duplicates
	case h.r.s.Err() != nil:
		return acquire.Verdict{}, lock.ErrClosed
	case h.once && err == nil:
		err = lock.ErrNotAcquired
	case !h.once && h.rounds == 1 && errors.As(err, new(*acquire.Unavailable)):
		err = nil // an error of the first attempt would end the acquisition
	}
	return acquire.Verdict{FreeIn: -1}, err
}

// collect asks all members and returns the number of those held once the outcome is decided
// or the time is over.
func (h *redHold) collect(ctx context.Context) (yes int, decided bool) {
	limit, cancel := context.WithTimeout(ctx, h.r.serverTimeout(h.ttl))
	defer cancel()
	h.ballot = newBallot(h.r)
	for i := range h.r.members {
		h.ballot.ask(ctx, i, h.ttl)
	}
	began := time.Now()
	var patience <-chan time.Time
	for {
		n := h.ballot.count()
		switch {
		case n.yes+n.open < h.r.quorum, n.yes >= h.r.quorum && n.awaited == 0:
			return n.yes, true
		case n.yes >= h.r.quorum:
			patience = nil
		case n.taken > 0 && patience == nil && !h.once:
			patience = time.After(max(minPatience<<min(h.rounds, 16), 4*time.Since(began)))
		}
		select {
		case <-h.ballot.changed:
			continue
		case <-patience:
			decided = true
		case <-limit.Done():
		case <-h.r.s.Done():
		}
		return h.ballot.count().yes, decided
	}
}

// undoRound releases the members of a round without a majority, and waits for that no
// longer than for a server. It returns an error if another round is pointless.
func (h *redHold) undoRound(decided bool) error {
	results, n := h.ballot.release(context.Background())
	limit := time.After(h.r.serverTimeout(h.ttl))
	for range n {
		select {
		case <-results:
			continue
		case <-limit:
		}
		break
	}
	if h.split++; n == 0 {
		h.split = 0
	} else {
		h.again = time.Now().Add(splitBackoff(h.split))
	}
	return h.ballot.verdict(decided)
}

// checkServers returns an error if two members are known to be on one server.
func (r *Red) checkServers() error {
	for i, m := range r.members {
		id := m.Session().KnownServer().ID
		same := func(other redMember) bool { return other.Session().KnownServer().ID == id }
		if id != "" && slices.ContainsFunc(r.members[:i], same) {
			return fmt.Errorf("%w: Redlock %q: server %d is the same as an earlier one", lock.ErrInvalid, r.info.Name, i+1)
		}
	}
	return nil
}

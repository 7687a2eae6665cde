package multilock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// minPatience is the least time that a round without a majority waits for more answers once
// a member is held by another owner. That owner may lack the votes collected here, and servers
// that have not answered may be down. The limit doubles with each round, in case they are only
// far away.
const minPatience = 5 * time.Millisecond

// round is the current round of a Redlock and its votes. Holds that pass the lock on also
// pass on the round.
type round struct {
	r       *Red
	votesMu sync.Mutex
	number  int // a vote for an earlier round is released
	votes   []vote
	changed chan struct{} // has capacity 1; signals each answer
}

// vote is the answer of a member. It keeps the hold of the member from when the server
// confirmed it until it is released or lost.
type vote struct {
	hold   memberHold
	asking bool // an attempt is under way
	err    error
}

// Join implements acquire.Acquirer: the members let their owner re-enter.
func (h *redHold) Join(holder *redHold) (acquire.Relation, error) {
	if holder.callerOwner == h.callerOwner {
		return acquire.Beside, nil
	}
	return acquire.Unrelated, nil
}

// TryAll implements acquire.Acquirer. It is not called: each caller has a round of its own.
func (h *redHold) TryAll(context.Context, []*redHold) []acquire.Result { return nil }

// Abandon implements acquire.Acquirer.
func (h *redHold) Abandon() { h.undo(context.Background()) }

// Try implements acquire.Acquirer: it runs one round of the algorithm.
func (h *redHold) Try(ctx context.Context) (acquire.Verdict, error) {
	if err := h.r.s.Err(); err != nil {
		return acquire.Verdict{}, err
	}
	if !h.pause(ctx) {
		return acquire.Verdict{FreeIn: -1}, nil // the queue reports the reason
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
	limit, cancel := context.WithTimeout(ctx, h.soon(h.r.serverTimeout(h.ttl)))
	defer cancel()
	number := h.newRound()
	for i := range h.votes {
		h.ask(ctx, i, number, h.ttl)
	}
	began := time.Now()
	var patience <-chan time.Time
	for {
		yes, taken, open := h.count()
		switch {
		case yes+open < h.r.quorum, yes >= h.r.quorum && !h.unidentified():
			return yes, true
		case yes >= h.r.quorum:
			patience = nil
		case taken > 0 && patience == nil && !h.once:
			patience = time.After(max(minPatience<<min(h.rounds, 16), 4*time.Since(began)))
		}
		select {
		case <-h.changed:
			continue
		case <-patience:
			decided = true
		case <-limit.Done():
		case <-h.r.s.Done():
		}
		yes, _, _ = h.count()
		return yes, decided
	}
}

// pause waits until the next round may begin, and reports whether it may. The releases of
// the last round wake the waiters here; without the pause they would split the votes again.
func (h *redHold) pause(ctx context.Context) bool {
	d := h.soon(time.Until(h.again))
	if d <= 0 {
		return true
	}
	select {
	case <-time.After(d):
		return h.deadline.IsZero() || time.Now().Before(h.deadline)
	case <-ctx.Done():
	case <-h.r.s.Done():
	}
	return false
}

// soon returns d, or the rest of the wait if that is less.
func (h *redHold) soon(d time.Duration) time.Duration {
	if h.deadline.IsZero() {
		return d
	}
	return min(d, time.Until(h.deadline))
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

// newRound begins a round and returns its number.
func (rd *round) newRound() int {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	rd.number++
	for i := range rd.votes {
		rd.votes[i] = vote{asking: true}
	}
	return rd.number
}

// count returns the numbers of members that are held, that another owner holds, and whose
// answer is pending.
func (rd *round) count() (yes, taken, open int) {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	for _, v := range rd.votes {
		switch {
		case v.hold != nil:
			yes++
		case v.asking:
			open++
		case isTaken(v.err):
			taken++
		}
	}
	return yes, taken, open
}

// isTaken reports whether err is the answer that another owner holds the member.
func isTaken(err error) bool {
	return errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, lock.ErrIndeterminate)
}

// ask makes an attempt for member i in the background. A member that is granted after the
// end of its round is released.
func (h *redHold) ask(ctx context.Context, i, number int, lease time.Duration) {
	rd := h.round // h may pass it on meanwhile
	asked := h.r.s.Go(func(context.Context) {
		// The attempt may outlast the caller, and the hold of a member may outlive its
		// context, which nothing watches.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.r.serverTimeout(h.ttl))
		defer cancel()
		// The server is identified before it votes, because two members on one server have
		// one vote. If it refuses the question, they remain undetected.
		if s := h.r.members[i].Session(); !s.AskedServer() {
			if _, err := s.Server(ctx); err != nil {
				session.Of[silent](s).Store(true)
			}
			rd.signal()
		}
		hold, err := h.r.members[i].Try(ctx, lease)
		rd.answered(ctx, i, number, hold, err)
	})
	if !asked {
		rd.answered(ctx, i, number, nil, lock.ErrClosed)
	}
}

// answered records the answer of member i.
func (rd *round) answered(ctx context.Context, i, number int, hold memberHold, err error) {
	rd.votesMu.Lock()
	if number != rd.number {
		rd.votesMu.Unlock()
		if err == nil {
			unlock := func(ctx context.Context) { _ = hold.Unlock(ctx) }
			if !rd.r.members[i].Session().Go(unlock) {
				unlock(ctx) // the client is closing and waits for this call
			}
		}
		return
	}
	v := &rd.votes[i]
	v.asking, v.err = false, err
	if err == nil {
		v.hold = hold
	}
	rd.votesMu.Unlock()
	rd.signal()
}

// signal wakes collect.
func (rd *round) signal() {
	select {
	case rd.changed <- struct{}{}:
	default:
	}
}

// silent is set once a client's server has not identified itself in time. It may still do so
// before it votes.
type silent struct{ atomic.Bool }

// unidentified reports whether an attempt is under way on a server that was not identified
// yet. It may be the server of another member, so a majority waits for it, but only once.
func (rd *round) unidentified() bool {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	for i, v := range rd.votes {
		if s := rd.r.members[i].Session(); v.asking && !s.AskedServer() && !session.Of[silent](s).Load() {
			return true
		}
	}
	return false
}

// undoRound releases the members of a round without a majority, and waits for that no
// longer than for a server. It returns an error if another round is pointless.
func (h *redHold) undoRound(decided bool) error {
	votes := h.take()
	results, n := h.releaseEach(context.Background(), votes)
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
	return h.verdict(votes, decided)
}

// take ends the round and returns its votes.
func (rd *round) take() []vote {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	rd.number++
	votes := slices.Clone(rd.votes)
	for i := range rd.votes {
		rd.votes[i].hold = nil
	}
	return votes
}

// close ends the round. Members that are granted from now on are released.
func (rd *round) close() {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	rd.number++
}

// verdict returns an error if the answers of the members make another round pointless. A
// server without an answer counts as unavailable only in an undecided round.
func (h *redHold) verdict(votes []vote, decided bool) error {
	var errs []error
	final := 0
	for i, v := range votes {
		err := v.err
		if v.asking && !decided {
			err = errors.New("no answer in time")
		}
		switch {
		case err == nil:
			continue
		case isFinal(err):
			final++
		case isTaken(err):
			continue
		}
		errs = append(errs, fmt.Errorf("server %d: %w", i+1, err))
	}
	switch err := errors.Join(errs...); {
	case len(votes)-final < h.r.quorum:
		return err
	case len(votes)-len(errs) < h.r.quorum:
		return &acquire.Unavailable{Err: fmt.Errorf("%w: Redlock %q: %w", lock.ErrNotAcquired, h.r.info.Name, err)}
	}
	return nil
}

// isFinal reports whether the next attempt would fail with the same error.
func isFinal(err error) bool {
	return errors.Is(err, lock.ErrInvalid) || errors.Is(err, lock.ErrReentered) || errors.Is(err, lock.ErrUpgrade) ||
		errors.Is(err, lock.ErrClosed) || refused(err)
}

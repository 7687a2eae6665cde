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
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/lock"
)

const (
	// minPatience is the least time that a round without a majority waits for more answers
	// once a member is held by another owner. That owner may lack the votes collected here,
	// and servers that have not answered may be down. The limit doubles with each round, in
	// case they are only far away.
	minPatience = 5 * time.Millisecond
	// minIdentify is the least time that a majority waits for the identification of servers
	// that were never identified.
	minIdentify = 20 * time.Millisecond
)

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
	hold   *memberHold
	asking bool // an attempt is under way
	err    error
}

// memberHold is the hold of a member. Its address identifies it, because a hold of another
// module may not be comparable.
type memberHold struct{ lock.Hold }

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
	if err := h.r.checkServers(); err != nil {
		return acquire.Verdict{}, err
	}
	sent := time.Now()
	yes, decided := h.collect(ctx)
	duplicates := h.r.checkServers() // more servers may be known by now
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
	number, rd := h.newRound(), h.round
	for i := range h.votes {
		h.ask(ctx, i, number, h.ttl)
	}
	began := time.Now()
	// after sets over once the wait for further answers has lasted d, and four times as long
	// as the answers until now took.
	after := func(over *atomic.Bool, d time.Duration) *time.Timer {
		return time.AfterFunc(max(d, 4*time.Since(began)), func() {
			over.Store(true)
			rd.signal()
		})
	}
	var patience, identify struct {
		timer *time.Timer
		over  atomic.Bool
	}
	for {
		yes, taken, open := h.count()
		switch {
		case yes+open < h.r.quorum:
			return yes, true
		case yes >= h.r.quorum && (identify.over.Load() || !h.unidentified()):
			return yes, true
		case yes >= h.r.quorum && identify.timer == nil:
			identify.timer = after(&identify.over, minIdentify)
			defer identify.timer.Stop()
		case yes >= h.r.quorum:
		case patience.over.Load():
			return yes, true
		case taken > 0 && patience.timer == nil && !h.once:
			patience.timer = after(&patience.over, minPatience<<min(h.rounds, 16))
			defer patience.timer.Stop()
		}
		select {
		case <-h.changed:
			continue
		case <-limit.Done():
		case <-h.r.s.Done():
		}
		yes, _, _ = h.count()
		return yes, false
	}
}

// pause waits until the next round may begin, and reports whether it may. The releases of
// the last round wake the waiters here; without the pause they would split the votes again.
func (h *redHold) pause(ctx context.Context) bool {
	d := h.soon(time.Until(h.again))
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
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
	id := func(l *locking.Lock) string {
		if l == nil {
			return ""
		}
		return l.Session().KnownServer().ID
	}
	for i, l := range r.known {
		server := id(l)
		if server != "" && slices.ContainsFunc(r.known[:i], func(other *locking.Lock) bool { return id(other) == server }) {
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
		if l := h.r.known[i]; l != nil && !l.Session().AskedServer() {
			_, _ = l.Session().Server(ctx)
			rd.signal()
		}
		hold, err := h.r.members[i].TryLock(ctx, lock.Lease(lease))
		rd.answered(ctx, i, number, hold, err)
	})
	if !asked {
		rd.answered(ctx, i, number, nil, lock.ErrClosed)
	}
}

// answered records the answer of member i.
func (rd *round) answered(ctx context.Context, i, number int, hold lock.Hold, err error) {
	rd.votesMu.Lock()
	if number != rd.number {
		rd.votesMu.Unlock()
		if err == nil {
			unlock := func(ctx context.Context) { _ = hold.Unlock(ctx) }
			if !rd.r.inBackground(i, unlock) {
				unlock(ctx) // the client is closing and waits for this call
			}
		}
		return
	}
	v := &rd.votes[i]
	v.asking, v.err = false, err
	if err == nil {
		v.hold = &memberHold{hold}
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

// unidentified reports whether an attempt is under way on a server that was never
// identified. It may be the server of another member.
func (rd *round) unidentified() bool {
	rd.votesMu.Lock()
	defer rd.votesMu.Unlock()
	for i, v := range rd.votes {
		if l := rd.r.known[i]; l != nil && v.asking && !l.Session().AskedServer() {
			return true
		}
	}
	return false
}

// undoRound releases the members of a round without a majority, and waits for that no
// longer than for a server. It returns an error if another round is pointless.
func (h *redHold) undoRound(decided bool) error {
	votes := h.take()
	rel := h.releaseEach(context.Background(), votes)
	limit, cancel := context.WithTimeout(context.Background(), h.r.serverTimeout(h.ttl))
	defer cancel()
	for range rel.n {
		select {
		case <-rel.results:
			continue
		case <-limit.Done():
		}
		break
	}
	if h.split++; rel.n == 0 {
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
	final, away := 0, 0
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
		away++
		errs = append(errs, fmt.Errorf("server %d: %w", i+1, err))
	}
	enough := func(n int) bool { return len(votes)-n >= h.r.quorum }
	switch err := errors.Join(errs...); {
	case !enough(final):
		return err
	case !enough(away):
		return &acquire.Unavailable{Err: fmt.Errorf("%w: Redlock %q: %w", lock.ErrNotAcquired, h.r.info.Name, err)}
	}
	return nil
}

// isFinal reports whether the next attempt would fail with the same error.
func isFinal(err error) bool {
	for _, target := range []error{lock.ErrInvalid, lock.ErrReentered, lock.ErrUpgrade, lock.ErrClosed, lock.ErrUnsupported} {
		if errors.Is(err, target) {
			return true
		}
	}
	return refused(err)
}

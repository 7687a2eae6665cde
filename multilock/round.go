package multilock

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// minPatience is the least time that a round without a majority waits for more answers once
// another owner holds a member: it may lack the votes collected here, and servers that have not
// answered may be down. The limit doubles with each round, in case they are only far away.
const minPatience = 5 * time.Millisecond

// Join implements engine.Acquirer: the members let their owner re-enter.
func (h *redHold) Join(holder engine.Acquirer) (engine.Relation, error) {
	if holder.(*redHold).owner == h.owner {
		return engine.SameOwner, nil
	}
	return engine.Conflict, nil
}

// TryAll implements engine.Acquirer. It is not called: each caller has a round of its own.
func (h *redHold) TryAll(context.Context, []engine.Acquirer) []engine.Answer { return nil }

// Describe implements engine.Acquirer.
func (h *redHold) Describe() session.Hold { return h.described() }

// Holds implements engine.Acquirer.
func (h *redHold) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		listed := h.described()
		listed.Remaining = h.Remaining()
		yield(h.Listed(listed))
	}
}

// Abandon implements engine.Acquirer.
func (h *redHold) Abandon() { h.undo(context.Background()) }

// Try implements engine.Acquirer: it runs one round of the algorithm.
func (h *redHold) Try(ctx context.Context) (engine.Answer, error) {
	if pause := h.pause(); pause > 0 {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return engine.Answer{FreeIn: -1}, nil // the queue reports the reason
		case <-h.r.s.Stopping():
			return engine.Answer{}, lock.ErrClosed
		}
	}

	h.rounds++
	began := time.Now()
	yes, decided := h.collect(ctx)

	// The round has identified servers.
	duplicates := checkDuplicates(h.r.members, sameServer, "a Redlock needs a server for each member:")
	h.sent = h.round.sent()
	if duplicates == nil && yes >= h.r.quorum && time.Since(h.sent) < h.ttl-drift(h.ttl) {
		return engine.Answer{Acquired: true}, nil
	}

	h.undoRound(ctx)
	var err error
	if duplicates == nil && yes+h.round.late() >= h.r.quorum {
		h.late++
		return engine.Answer{FreeIn: -1}, engine.Late(h.late, !h.once, h.ttl, began)
	}

	h.answers, err = h.round.verdict(yes, decided)
	switch {
	case duplicates != nil:
		return engine.Answer{}, duplicates
	case h.r.s.Stopped() != nil:
		return engine.Answer{}, lock.ErrClosed
	case h.once && err == nil:
		err = lock.ErrNotAcquired
	case ctx.Err() != nil && errors.As(err, new(*engine.Unavailable)):
		// The caller cut the round short, which says nothing to the other waiters.
		err = &engine.Unavailable{Err: errors.Join(errNoMajority, ctx.Err())}
	}

	return engine.Answer{FreeIn: -1}, err
}

// collect asks all members and returns the number of those held once the outcome is decided
// or the time is over.
func (h *redHold) collect(ctx context.Context) (yes int, decided bool) {
	limit, cancel := session.Linger(ctx, h.r.serverTimeout(h.ttl))
	defer cancel()

	h.round = &round{r: h.r, changed: make(chan struct{}, 1), granted: &h.granted, votes: make([]vote, len(h.r.members))}
	h.round.askMissing(ctx, h.ttl)
	began := time.Now()
	identifying := false
	var patience <-chan time.Time
	for {
		n := h.round.count()
		switch {
		case n.yes+n.open < h.r.quorum, n.yes >= h.r.quorum && n.awaited == 0:
			return n.yes, true
		case n.yes >= h.r.quorum:
			if identifying {
				break
			}
			// A server that does not identify itself gets no more than half of the caller's time.
			identifying = true
			patience = nil
			if deadline, ok := ctx.Deadline(); ok {
				patience = time.After(time.Until(deadline) / 2)
			}
		case n.taken > 0 && patience == nil && !h.once:
			patience = time.After(max(minPatience<<min(h.rounds, 16), 4*time.Since(began)))
		}
		select {
		case <-h.round.changed:
			continue
		case <-patience:
			decided = true
		case <-limit.Done():
		case <-h.r.s.Done():
		}
		return h.round.count().yes, decided
	}
}

// undoRound releases the members of a round without a majority, and waits for that no
// longer than for a server, or a moment after ctx has ended.
func (h *redHold) undoRound(ctx context.Context) {
	limit, cancel := session.Linger(ctx, h.r.serverTimeout(h.ttl))
	defer cancel()
	released := h.round.release(limit)
	h.early = released.open > 0
	if h.early {
		wait(released, limit.Done(), nil)
	}
	h.over = time.Now()
}

// pause returns the time until the next round. The releases of the last one wake the waiters, which
// would split the votes again. So do the releases of members that are granted when their round is over, but
// the first time their holder has probably just released them all.
func (h *redHold) pause() time.Duration {
	if !h.granted.Swap(false) {
		h.split = 0
		return 0
	}

	h.split++
	if h.split == 1 && !h.early {
		return 0
	}

	return time.Until(h.over.Add(splitBackoff(h.split)))
}

// sameServer reports whether two members are known to be on one server.
func sameServer(a, b *engine.Lock) bool {
	server := a.Session().KnownServer()
	return server.ID != "" && server.ID == b.Session().KnownServer().ID
}

// round is one round of the algorithm with the votes of the members. Holds that pass the lock
// on also pass on the round.
type round struct {
	r       *Red
	changed chan struct{} // has capacity 1; signals each answer
	granted *atomic.Bool  // set by each grant

	mu       sync.Mutex
	votes    []vote
	released *tally // of the last release; a member that is granted after it is released too
}

// vote is the answer of a member. It keeps the hold of the member from when the server
// confirmed it until it is released or lost.
type vote struct {
	hold    engine.MemberHold
	sent    time.Time // when it was requested
	err     error
	asking  bool // an attempt is under way
	late    bool // it was, when the round was released
	awaited bool // even by a majority
}

// askMissing makes an attempt for each member that is not held, in the background.
func (rd *round) askMissing(ctx context.Context, lease time.Duration) {
	rd.mu.Lock()
	defer rd.mu.Unlock()

	var all *attempts
	for i := range rd.votes {
		v := &rd.votes[i]
		if v.hold != nil || v.asking || rd.released != nil {
			continue
		}
		if all == nil {
			all = rd.newAttempts(ctx, lease)
			defer all.done()
		}
		s := rd.r.members[i].Session()
		v.asking = true
		v.awaited = s.AwaitServer()
		all.open.Add(1)
		if !rd.r.s.Go(func(context.Context) { rd.ask(all, i) }) {
			*v = vote{err: lock.ErrClosed}
			all.done()
		}
	}
}

// attempts are attempts for several members at once. They may outlast the caller, and the hold of a
// member may outlive its context, which nothing watches.
type attempts struct {
	ctx    context.Context
	cancel context.CancelFunc
	lease  time.Duration
	open   atomic.Int32 // those that have no answer, and askMissing until it returns
}

func (rd *round) newAttempts(ctx context.Context, lease time.Duration) *attempts {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), rd.r.serverTimeout(lease), errNoAnswer)
	all := &attempts{ctx: wire.Shared(ctx), cancel: cancel, lease: lease}
	all.open.Store(1)
	return all
}

func (all *attempts) done() {
	if all.open.Add(-1) == 0 {
		all.cancel()
	}
}

// ask makes an attempt for member i.
func (rd *round) ask(all *attempts, i int) {
	defer all.done()

	ctx := all.ctx
	m := rd.r.members[i]

	// The server is identified before it votes, because two members on one server have one
	// vote. If it refuses the question, they remain undetected.
	_, _ = m.Session().Server(ctx)
	sent := time.Now()
	hold, err := m.TryMember(ctx, all.lease)
	if err == nil && rd.r.restartDelay > 0 {
		// The server is asked after its vote: it may have restarted just before.
		if err = rd.r.checkUptime(ctx, m.Session(), sent); err != nil {
			_ = hold.Unlock(ctx)
		}
	}

	rd.mu.Lock()
	late := rd.released
	rd.votes[i] = vote{err: err, late: late != nil}
	if err == nil {
		rd.votes[i].hold = hold
		rd.votes[i].sent = sent
		rd.granted.Store(true)
	}
	rd.mu.Unlock()
	switch {
	case late == nil:
	case err == nil:
		rd.drop(ctx, i, hold, late, true)
	default:
		late.answers <- answer{i: i, err: err, late: true}
	}

	select {
	case rd.changed <- struct{}{}:
	default:
	}
}

// errRestarted is the answer of a server that may have forgotten a lock that it granted. It is as
// good as the answer of a server that has not.
var errRestarted = fmt.Errorf("%w: the server has restarted", lock.ErrNotAcquired)

// checkUptime returns an error if the server may have started less than restartDelay before sent.
func (r *Red) checkUptime(ctx context.Context, s *session.Session, sent time.Time) error {
	since, err := s.Since(ctx)
	if err == nil && sent.Sub(since) < r.restartDelay {
		err = errRestarted
	}
	return err
}

// count returns the numbers of members that are held, that another owner holds, and whose
// answer is pending; a majority waits for some of these.
func (rd *round) count() (n struct{ yes, taken, open, awaited int }) {
	rd.mu.Lock()
	defer rd.mu.Unlock()

	for _, v := range rd.votes {
		if v.hold != nil {
			n.yes++
		} else if v.asking {
			n.open++
			if v.awaited {
				n.awaited++
			}
		} else if isTaken(v.err) {
			n.taken++
		}
	}

	return n
}

// late returns the number of members that were granted, and were over before the confirmation came.
func (rd *round) late() (n int) {
	rd.mu.Lock()
	defer rd.mu.Unlock()
	for _, v := range rd.votes {
		if errors.Is(v.err, engine.ErrLate) {
			n++
		}
	}
	return n
}

// settle waits until all members have answered, for d at most.
func (rd *round) settle(d time.Duration) {
	if rd.count().open == 0 {
		return
	}

	limit := time.After(d)
	for rd.count().open > 0 {
		select {
		case <-rd.changed:
		case <-limit:
			return
		}
	}
}

// sent returns when the first of the members that are held was requested.
func (rd *round) sent() (first time.Time) {
	rd.mu.Lock()
	defer rd.mu.Unlock()
	for _, v := range rd.votes {
		if v.hold != nil && (first.IsZero() || v.sent.Before(first)) {
			first = v.sent
		}
	}
	return first
}

// hold returns the hold of member i, or nil.
func (rd *round) hold(i int) engine.MemberHold {
	rd.mu.Lock()
	defer rd.mu.Unlock()
	return rd.votes[i].hold
}

// drop releases the hold of member i in the background and sends the result to t, which may be
// nil. It reports false if the member was dropped before, or is not late as the caller says. It blocks
// while the member's client is closing.
func (rd *round) drop(ctx context.Context, i int, hold engine.MemberHold, t *tally, late bool) bool {
	rd.mu.Lock()
	if rd.votes[i].hold != hold || rd.votes[i].late != late {
		rd.mu.Unlock()
		return false
	}

	rd.votes[i].hold = nil
	rd.mu.Unlock()
	unlock := func(context.Context) {
		err := hold.Unlock(ctx)
		if t != nil {
			t.answers <- answer{i, err, hold.Receivers(), late}
		}
	}

	// The member's client runs it, because the Redlock's client may close first.
	if !rd.r.members[i].Session().Go(unlock) {
		unlock(ctx)
	}
	return true
}

// release closes the round and drops all members that are held, now or when they are granted.
func (rd *round) release(ctx context.Context) *tally {
	t := &tally{answers: make(chan answer, len(rd.votes))}
	rd.mu.Lock()
	rd.released = t
	for _, v := range rd.votes {
		if v.asking {
			t.asking++
		}
	}
	rd.mu.Unlock()
	for i := range rd.votes {
		if hold := rd.hold(i); hold != nil && rd.drop(ctx, i, hold, t, false) {
			t.open++
		}
	}

	return t
}

package multilock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// ballot is the votes of the members in one round. Holds that pass the lock on also pass on
// the ballot.
type ballot struct {
	r       *Red
	changed chan struct{} // has capacity 1; signals each answer

	mu     sync.Mutex
	votes  []vote
	closed bool // a member that is granted now is released
}

// vote is the answer of a member. It keeps the hold of the member from when the server
// confirmed it until it is released or lost.
type vote struct {
	hold    memberHold
	err     error
	asking  bool // an attempt is under way
	awaited bool // even by a majority
}

// asked is set once a member of a client was asked whose server was not identified before. It
// may be the server of another member, so a majority waits for its answer, but only once.
type asked struct{ atomic.Bool }

// newBallot returns a ballot for a round that asks all members.
func newBallot(r *Red) *ballot {
	b := &ballot{r: r, changed: make(chan struct{}, 1), votes: make([]vote, len(r.members))}
	for i, m := range r.members {
		s := m.Session()
		b.votes[i] = vote{asking: true, awaited: !s.AskedServer() && !session.Of[asked](s).Swap(true)}
	}
	return b
}

// ask makes an attempt for member i in the background.
func (b *ballot) ask(ctx context.Context, i int, lease time.Duration) {
	m := b.r.members[i]
	begun := b.r.s.Go(func(context.Context) {
		// The attempt may outlast the caller, and the hold of a member may outlive its
		// context, which nothing watches.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.r.serverTimeout(lease))
		defer cancel()
		// The server is identified before it votes, because two members on one server have
		// one vote. If it refuses the question, they remain undetected.
		_, _ = m.Session().Server(ctx)
		hold, err := m.Try(ctx, lease)
		b.answer(ctx, i, hold, err)
	})
	if !begun {
		b.answer(ctx, i, nil, lock.ErrClosed)
	}
}

// answer records the answer of member i.
func (b *ballot) answer(ctx context.Context, i int, hold memberHold, err error) {
	b.mu.Lock()
	late := b.closed
	b.votes[i] = vote{err: err}
	if err == nil {
		b.votes[i].hold = hold
	}
	b.mu.Unlock()
	if late && err == nil {
		b.drop(ctx, i, hold, nil)
	}
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// count returns the numbers of members that are held, that another owner holds, and whose
// answer is pending; a majority waits for some of these.
func (b *ballot) count() (n struct{ yes, taken, open, awaited int }) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, v := range b.votes {
		switch {
		case v.hold != nil:
			n.yes++
		case v.asking:
			n.open++
			if v.awaited {
				n.awaited++
			}
		case isTaken(v.err):
			n.taken++
		}
	}
	return n
}

// held returns the holds of the members, nil for those that are not held.
func (b *ballot) held() []memberHold {
	b.mu.Lock()
	defer b.mu.Unlock()
	held := make([]memberHold, len(b.votes))
	for i, v := range b.votes {
		held[i] = v.hold
	}
	return held
}

// freed is the result of the release of a member.
type freed struct {
	err       error
	receivers int
}

// drop releases the hold of member i in the background, and sends the result unless results is
// nil. It reports false if the member was dropped before. It blocks while the member's client is
// closing.
func (b *ballot) drop(ctx context.Context, i int, hold memberHold, results chan<- freed) bool {
	b.mu.Lock()
	found := b.votes[i].hold == hold
	if found {
		b.votes[i].hold = nil
	}
	b.mu.Unlock()
	if !found {
		return false
	}
	unlock := func(context.Context) {
		err := hold.Unlock(ctx)
		if results != nil {
			results <- freed{err, hold.Receivers()}
		}
	}
	// The member's client runs it, because the Redlock's client may close first.
	if !b.r.members[i].Session().Go(unlock) {
		unlock(ctx)
	}
	return true
}

// release closes the ballot and drops the n members that are held. results has capacity for
// all.
func (b *ballot) release(ctx context.Context) (results chan freed, n int) {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	results = make(chan freed, len(b.votes))
	for i, hold := range b.held() {
		if hold != nil && b.drop(ctx, i, hold, results) {
			n++
		}
	}
	return results, n
}

// verdict returns an error if the answers of the members make another round pointless. A
// server without an answer counts as unavailable only in an undecided round.
func (b *ballot) verdict(decided bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	final := 0
	for i, v := range b.votes {
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
	case len(b.votes)-final < b.r.quorum:
		return err
	case len(b.votes)-len(errs) < b.r.quorum:
		return &acquire.Unavailable{Err: fmt.Errorf("%w: Redlock %q: %w", lock.ErrNotAcquired, b.r.info.Name, err)}
	}
	return nil
}

// isTaken reports whether err is the answer that another owner holds the member.
func isTaken(err error) bool {
	return errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, lock.ErrIndeterminate)
}

// isFinal reports whether the next attempt would fail with the same error.
func isFinal(err error) bool {
	return errors.Is(err, lock.ErrInvalid) || errors.Is(err, lock.ErrReentered) || errors.Is(err, lock.ErrUpgrade) ||
		errors.Is(err, lock.ErrClosed) || refused(err)
}

package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// Red is a lock on several servers, one for each member. The caller that holds a majority
// of the members holds the lock. Client.RedLock creates it. The package documentation says
// when to use it.
type Red struct {
	group
	members []redMember
	quorum  int
	timeout time.Duration // 0: see serverTimeout
	queue   string        // the name of the local queue
	channel string        // the channel of releases, "" if the session cannot hear any
	shared  bool          // whether several callers can hold it at once, as readers
}

// redMember is a member of a Redlock.
type redMember struct {
	*locking.Lock
	voter
}

// voter makes the attempts of a member and extends its holds. Tests replace it.
type voter interface {
	Try(ctx context.Context, lease time.Duration) (memberHold, error)
	Extend(ctx context.Context, holds []memberHold, lease time.Duration, shared bool) []error
}

// memberHold is the hold of a member.
type memberHold interface {
	Unlock(ctx context.Context) error
	Receivers() int
}

type lockVoter struct{ l *locking.Lock }

func (v lockVoter) Try(ctx context.Context, lease time.Duration) (memberHold, error) {
	return v.l.TryMember(ctx, lease)
}

func (lockVoter) Extend(ctx context.Context, holds []memberHold, lease time.Duration, shared bool) []error {
	all := make([]*locking.Hold, len(holds))
	for i, h := range holds {
		all[i] = h.(*locking.Hold)
	}
	return locking.ExtendTogether(ctx, all, lease, shared)
}

// NewRed returns a lock on a majority of the members. Only the client calls NewRed.
func NewRed(s *session.Session, members ...lock.Locker) *Red {
	var all []redMember
	var bad error
	for i, m := range members {
		if l := locking.Find(m); l != nil {
			all = append(all, redMember{l, lockVoter{l}})
		} else {
			bad = cmp.Or(bad, badMember("red", i, m))
		}
	}
	return newRed(s, all, bad)
}

func newRed(s *session.Session, members []redMember, bad error) *Red {
	r := &Red{members: members, quorum: len(members)/2 + 1, shared: true}
	var (
		id       strings.Builder
		names    []string
		sessions []*session.Session
	)
	for _, m := range members {
		if slices.Contains(sessions, m.Session()) {
			bad = cmp.Or(bad, fmt.Errorf("%w: two members of a Redlock belong to one client: each needs a server of its own", lock.ErrInvalid))
		}
		names, sessions = append(names, m.Name()), append(sessions, m.Session())
		if m.Session() == s {
			r.channel = m.Channel()
		}
		r.shared = r.shared && m.Traits().Shared
		fmt.Fprintf(&id, "%s %s %q;", m.Traits().Kind, m.Session().ID, m.Key())
	}
	r.group, r.queue = newGroup(s, "red", names), id.String()
	r.err = cmp.Or(bad, r.err)
	if n := len(members); n%2 == 0 && r.err == nil {
		if _, before := session.Of[warned](s).LoadOrStore(n, true); !before {
			s.Logger.Warn("redlatch: a Redlock has an even number of servers, which adds no fault tolerance",
				"name", r.info.Name, "servers", n)
		}
	}
	return r
}

// warned are the numbers of servers that a client has warned about.
type warned struct{ sync.Map }

// WithTimeout returns the same lock with a different limit on the wait for one server
// during an acquisition. The limit should be small compared to the lease, because waiting
// uses up the lease. The default is a twentieth of the lease, at least 50 ms and at most 1 s.
// If perServer is not positive, every method returns an error.
func (r *Red) WithTimeout(perServer time.Duration) *Red {
	other := *r
	other.timeout = perServer
	if perServer <= 0 && other.err == nil {
		other.err = fmt.Errorf("%w: Redlock timeout %v: must be greater than zero", lock.ErrInvalid, perServer)
	}
	return &other
}

const (
	leastTimeout = 50 * time.Millisecond
	mostTimeout  = time.Second
)

// serverTimeout bounds the wait for a server. It never exceeds the usable lease.
func (r *Red) serverTimeout(lease time.Duration) time.Duration {
	return min(cmp.Or(r.timeout, min(max(lease/20, leastTimeout), mostTimeout)), lease-drift(lease))
}

// drift is subtracted from the lease, because the clocks of servers may run faster than
// the local one.
func drift(lease time.Duration) time.Duration { return lease/100 + 2*time.Millisecond }

// Name returns the name of the members, or their names if these differ.
func (r *Red) Name() string { return r.info.Name }

// Lock acquires a majority of the members. It waits until that succeeds, ctx is done, or
// lock.Wait runs out. It asks all members at once, each for at most the time set by
// WithTimeout, and returns as soon as it has a majority; members that are granted later
// join the hold. The first acquisition also waits until the servers have identified
// themselves, or for that time. An attempt without a majority releases its members, and
// Lock tries again after a random pause that grows.
//
// The hold is valid for the lease, less the time of the acquisition, less 1 % of the lease
// and 2 ms for clock drift (see Hold.Remaining). A lease without any time left, 2 ms or
// less, is an error that matches lock.ErrInvalid. Without lock.Lease the lease is the
// watchdog timeout of the client that created r. Each renewal acquires missing members
// again. The hold is lost unless a majority confirms a renewal in time.
//
// See lock.Locker for the errors. If too few servers respond for a majority, Lock keeps
// trying for the watchdog timeout; then the error matches lock.ErrNotAcquired and
// includes the errors of the servers. Two members on one server, or a member that is nil, a
// Multi, a Red or a type of another module, are an error that matches lock.ErrInvalid. The
// hold's Owner is the owner in ctx, or zero. The hold has no fencing token.
func (r *Red) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	return handleOf(r.acquire(ctx, o, o.Bounded && o.Wait == 0))
}

// TryLock asks every member once. Without a majority it releases the members it acquired
// and returns an error that matches lock.ErrNotAcquired. It blocks until the outcome is
// certain, for at most twice the time set by WithTimeout. See Lock.
func (r *Red) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := locking.TryOptions(opts)
	if err != nil {
		return nil, err
	}
	return handleOf(r.acquire(ctx, o, true))
}

// Do runs fn while it holds the lock. See lock.Locker.
func (r *Red) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, r, fn, opts...)
}

// splitBackoff is the pause after n attempts in a row without a majority. It is random, so
// that contenders that split the votes return at different times.
func splitBackoff(n int) time.Duration {
	const first, longest = 4 * time.Millisecond, 500 * time.Millisecond
	return time.Millisecond + rand.N(min(first<<min(n, 10), longest))
}

func (r *Red) acquire(ctx context.Context, o lock.Options, once bool) (*redHold, error) {
	if err := r.check(ctx); err != nil {
		return nil, err
	}
	for _, m := range r.members {
		if err := m.Check(ctx); errors.Is(err, lock.ErrInvalid) {
			return nil, err
		}
	}
	h := &redHold{
		groupHold: groupHold{group: &r.group}, r: r, once: once, ttl: cmp.Or(o.Lease, r.s.WatchdogTimeout),
		round: &round{r: r, votes: make([]vote, len(r.members)), changed: make(chan struct{}, 1)},
	}
	if h.ttl <= drift(h.ttl) {
		return nil, fmt.Errorf("%w: lease %v: that of a Redlock must be more than %v", lock.ErrInvalid, h.ttl, drift(h.ttl))
	}
	h.callerOwner, _ = lock.OwnerFrom(ctx)
	h.fixed = o.Lease > 0
	req := acquire.Request[*redHold]{
		Key: h.key(), Acquirer: h, Channel: r.channel, Backoff: splitBackoff,
		Once: once, Owned: !h.callerOwner.IsZero(), TryWhileHeld: r.shared, Shared: r.shared,
	}
	if o.Bounded && !once {
		h.deadline = time.Now().Add(o.Wait)
		req.Deadline = h.deadline
	}
	if !r.s.Enter() {
		return nil, lock.ErrClosed
	}
	defer r.s.Leave()
	spanCtx, span := r.s.Telemetry.StartAcquire(ctx, r.info)
	if r.s.Telemetry != nil {
		req.OnWake = span.Woken
	}
	err := r.queues().Acquire(spanCtx, req)
	if err == nil {
		err = h.begin(ctx, o)
	}
	span.End(ctx, h.rounds, h.rounds != 1 || errors.Is(err, lock.ErrNotAcquired), err)
	if err != nil {
		return nil, err
	}
	return h, nil
}

// handleOf returns what the caller of Lock gets.
func handleOf(h *redHold, err error) (lock.Hold, error) {
	if err != nil {
		return nil, err
	}
	return newHandle(h), nil
}

// redHold is a hold on a majority, or the attempt to acquire one.
type redHold struct {
	groupHold
	r           *Red
	once        bool
	callerOwner lock.Owner    // zero: none
	fixed       bool          // not renewed
	deadline    time.Time     // of Wait
	ttl         time.Duration // of the members' leases
	rounds      int
	split       int       // consecutive rounds that acquired some members, but no majority
	again       time.Time // the earliest start of the next round
	sent        time.Time // the start of the round that succeeded
	lease       watchdog.Lease
	cohort      *locking.Cohort // shared by the holds that pass on the members, or nil
	extended    atomic.Bool     // by the caller

	*round
}

// begin makes a hold of an attempt that has succeeded.
func (h *redHold) begin(ctx context.Context, o lock.Options) error {
	h.groupHold.begin(ctx)
	if h.cohort != nil && o.MaxHold > 0 {
		o.MaxHold += time.Since(h.sent) // MaxHold counts from the hand-off
	}
	terms := watchdog.Terms{Sent: h.sent, TTL: h.ttl - drift(h.ttl), MaxHold: o.MaxHold}
	if o.Lease == 0 {
		terms.Renewer = redRenewer{}
	}
	h.lease.Key = h.r.queue
	watched := h.r.s.Watchdog.Watch(&h.lease, h, terms)
	if h.cohort.Gone() {
		h.Lost(lock.ReasonGone, nil)
		h.lease.Forget() // the loss may have preceded Watch
	}
	switch {
	case !watched || h.r.s.Err() != nil:
		return errors.Join(lock.ErrClosed, exceptLost(h.Unlock(ctx)))
	case ctx.Err() != nil:
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx), exceptLost(h.Unlock(ctx)))
	case time.Since(h.sent) >= terms.TTL:
		return errors.Join(lock.ErrNotAcquired, exceptLost(h.Unlock(ctx)))
	}
	return nil
}

// Dropped implements hold.Hold.
func (h *redHold) Dropped() { h.dropped(h.Unlock) }

// Lost implements watchdog.Holder.
func (h *redHold) Lost(reason lock.Reason, cause error) {
	if !h.lose(reason, cause) {
		return
	}
	h.lease.Forget()
	if reason == lock.ReasonMaxHold || reason == lock.ReasonClosed {
		// The work may not have stopped yet, so the members are left to their leases or to
		// Unlock.
		h.close()
	} else {
		h.r.s.Go(func(context.Context) { h.undo(context.Background()) }) // the watchdog does not wait
	}
	h.r.queues().Released(h.key(), h, acquire.Release{Receivers: -1})
}

func (r *Red) queues() *acquire.Queues[*redHold] { return acquire.Of[*redHold](r.s) }

func (h *redHold) key() acquire.Key { return acquire.Key{Kind: h.r.info.Kind, Name: h.r.queue} }

// Remaining implements lock.Hold.
func (h *redHold) Remaining() time.Duration { return h.lease.Remaining() }

package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// Red is a lock on several servers, held by the caller that holds a majority of the members.
// Client.RedLock creates it. The package documentation says when to use it.
type Red struct {
	group
	members []*engine.Lock
	absent  int // servers without a member
	quorum  int
	timeout time.Duration // 0: see serverTimeout
	// restartDelay is the uptime before which the vote of a server does not count.
	restartDelay time.Duration
	key          engine.Key // of the local queue
	channel      string     // the channel of releases, "" if the session cannot hear any
	shared       bool       // whether several callers can hold it at once, as readers
}

// Option configures a Red. An option that is nil or invalid makes every method return an error that matches
// lock.ErrInvalid.
type Option func(*Red) error

// Timeout sets the limit on the wait for one server during an acquisition. The limit should be small compared to the
// lease, because waiting uses up the lease. The default is a twentieth of the lease, at least 50 ms and at most 1 s.
// perServer must be positive.
func Timeout(perServer time.Duration) Option {
	return func(r *Red) error {
		r.timeout = perServer
		if perServer <= 0 {
			return fmt.Errorf("multilock.Timeout(%v): must be greater than zero", perServer)
		}
		return nil
	}
}

// RestartDelay gives a server no vote during the time d
// after it started, or after the client noticed that another server had replaced it. A server
// that restarted without its data, or a replica that was promoted, may not know a lock that
// it granted. The algorithm asks operators to keep such a server offline until all leases of
// that time are over; with this option nobody has to. d should be at least the longest lease of
// all callers, and all should use the option. d must be positive.
//
// Until then Lock waits as if others held the lock, and TryLock returns an error that matches
// lock.ErrNotAcquired. Each vote costs one more round trip, for INFO. If a server does not
// report its run id and uptime, or is a cluster, it has no vote, and its error matches
// lock.ErrUnsupported.
func RestartDelay(d time.Duration) Option {
	return func(r *Red) error {
		r.restartDelay = d
		if d <= 0 {
			return fmt.Errorf("multilock.RestartDelay(%v): must be greater than zero", d)
		}
		return nil
	}
}

// Absent adds n servers without a vote: a majority of all servers
// must grant the lock. It is for a process that starts while some servers are down, and so has no
// clients of them. n must not be negative. If
// the members are no majority, every method returns an error that matches lock.ErrUnavailable.
func Absent(n int) Option {
	return func(r *Red) error {
		r.absent = n
		if n < 0 {
			return fmt.Errorf("multilock.Absent(%d): must not be negative", n)
		}
		return nil
	}
}

// NewRed returns a lock on a majority of the members. Client.RedLock and redlatch.RedLock call it, with
// nil if no member has a client.
func NewRed(all *Shared, members []lock.Locker, opts ...Option) *Red {
	var locks []*engine.Lock
	var names []string
	var bad error
	for i, m := range members {
		l, err := find("red", i, m)
		if err != nil {
			bad = cmp.Or(bad, err)
		} else {
			locks = append(locks, l)
		}
		if l != nil {
			names = append(names, l.Name())
		}
	}

	if all == nil {
		return &Red{group: newGroup(nil, "red", names, nil, bad)}
	}

	s := all.e.Session
	r := &Red{members: locks, key: engine.Key{Kind: "red"}, shared: true}
	bad = cmp.Or(bad, session.Configure(r, opts))
	servers := len(locks) + r.absent
	r.quorum = servers/2 + 1
	if bad == nil && len(locks) > 0 && len(locks) < r.quorum {
		bad = fmt.Errorf("%w: Redlock: %d of %d servers are absent", lock.ErrUnavailable, r.absent, servers)
	}
	for _, m := range locks {
		if m.Session() == s {
			r.channel = m.Channel()
		}
		r.shared = r.shared && m.Kind().Shared
		r.key.Name += fmt.Sprintf("%s %s %q;", m.Kind().Name, m.Session().ID, m.Key())
	}

	r.key.Name += fmt.Sprintf("quorum %d;", r.quorum)

	sameClient := func(a, b *engine.Lock) bool { return a.Session() == b.Session() }
	bad = cmp.Or(bad, checkDuplicates(locks, sameClient, "a Redlock needs a client and a server for each member:"))
	r.group = newGroup(all, "red", names, []engine.LockID{{Client: s.ID, Key: r.key}}, bad)
	r.reads = slices.ContainsFunc(locks, func(m *engine.Lock) bool { return m.Kind().Shared })
	return r
}

// warnEven logs an even number of servers, once for each number.
func (r *Red) warnEven() {
	n := len(r.members) + r.absent
	if n%2 != 0 {
		return
	}
	if r.all.even.First(telemetry.Lock{Kind: "red servers", Name: strconv.Itoa(n)}) {
		r.s.Logger.Warn("redlatch: a Redlock has an even number of servers, which adds no fault tolerance",
			"name", text.Safe(r.info.Name), "servers", n)
	}
}

// serverTimeout bounds the wait for a server. An answer after the lease is of no use but to say that it is too
// late, so the wait does not exceed the lease by more than a moment.
func (r *Red) serverTimeout(lease time.Duration) time.Duration {
	return min(cmp.Or(r.timeout, min(max(lease/20, leastTimeout), time.Second)), lease+leastTimeout)
}

// drift is subtracted from the lease, because the clocks of servers may run faster than
// the local one.
func drift(lease time.Duration) time.Duration { return lease/100 + 2*time.Millisecond }

// Name returns the name of the members, or their names if these differ.
func (r *Red) Name() string { return r.info.Name }

// Lock acquires a majority of the members. It waits until that succeeds, ctx is done, or
// lock.Wait runs out. It asks all members at once, each for at most the time set by
// Timeout, and returns as soon as it has a majority; members that are granted later
// join the hold. The first acquisition awaits the answers of all servers, for that time, to
// detect that two members are on one. An attempt without a majority releases its members,
// and Lock tries again after a random pause that grows.
//
// The hold is valid for the lease, less the time of the acquisition, 1% of the lease and
// 2 ms for clock drift (see Hold.Remaining). Without lock.Lease the lease is the watchdog
// timeout of the client that created r. Each renewal acquires missing members again. The
// hold is lost unless a majority confirms a renewal in time.
//
// Unlock returns when a majority is released, which suffices for the next caller of the Redlock.
// Other members are released when their servers answer.
//
// See lock.Locker for the errors. If too few servers respond for a majority, Lock keeps
// trying until its wait ends. Then the error matches lock.ErrIndeterminate if the silent
// servers may have completed a majority, and otherwise lock.ErrUnavailable; it counts the
// servers by answer. It matches lock.ErrInvalid if the lease leaves no valid time
// (2 ms or less), if two members are on one server, or if a member is nil, a Multi, a Red or
// a type of another module. lock.OwnerOf returns the owner in ctx, or the zero Owner. The hold has no
// fencing token.
func (r *Red) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return open(ctx, &r.group, opts, false, r.acquire)
}

// TryLock asks every member once. Without a majority it releases the members it acquired
// and returns an error, which matches lock.ErrNotAcquired if enough servers have answered. It
// blocks until the outcome is certain, for at most twice the time set by Timeout. See Lock.
func (r *Red) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return open(ctx, &r.group, opts, true, r.acquire)
}

// Do runs fn while it holds the lock. See lock.Locker.
func (r *Red) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, r.object(), r, fn, opts...)
}

// splitBackoff is the pause after n attempts in a row without a majority. It is random, so
// that contenders that split the votes return at different times.
func splitBackoff(n int) time.Duration {
	return time.Millisecond + rand.N(min(4*time.Millisecond<<min(n, 10), 500*time.Millisecond))
}

func (r *Red) acquire(ctx context.Context, o lock.Options, once bool) (*redHold, error) {
	if err := r.check(ctx); err != nil {
		return nil, err
	}

	r.warnEven()
	owner, named := lock.OwnerFrom(ctx)
	h := &redHold{
		groupHold: groupHold{group: &r.group, owner: owner, fixed: o.Lease > 0}, r: r, once: once, ttl: cmp.Or(o.Lease, r.s.WatchdogTimeout),
	}
	h.passable.Store(!named && o.Lease == 0 && !r.shared)
	if h.ttl <= drift(h.ttl) {
		return nil, r.object().Refused("acquire",
			fmt.Errorf("%w: lease %v: that of a Redlock must be more than %v", lock.ErrInvalid, h.ttl, drift(h.ttl)))
	}

	began := time.Now()
	if !r.s.Enter() {
		return nil, r.object().Refused("acquire", lock.ErrClosed)
	}
	defer r.s.Leave()

	spanCtx, span := r.s.Telemetry.StartAcquire(ctx, r.info)
	req := engine.Request{
		Waiting: engine.Waiting{Shareable: r.shared, Shared: r.shared, Backoff: splitBackoff},
		Key:     h.r.key, Acquirer: h, Once: once, Owned: named, Site: callsite.Of(o.Site), Span: span,
	}
	req.SetWait(&o, began)

	err := r.queues().Acquire(spanCtx, &req)
	if err == nil {
		err = h.begin(ctx, o)
	} else if h.answers != nil {
		err = errors.Join(err, h.answers)
	}
	err = r.failed(ctx, "acquire", began, err)
	span.End(ctx, h.rounds, h.rounds != 1 || errors.Is(err, lock.ErrNotAcquired), err)
	return h, err
}

// Channel implements engine.Acquirer.
func (h *redHold) Channel() string { return h.r.channel }

// redHold is a hold on a majority, or the attempt to acquire one.
type redHold struct {
	groupHold
	watchdog.Lease
	r        *Red
	once     bool
	passable atomic.Bool   // renewed, not extended, exclusive and without a named owner
	ttl      time.Duration // of the members' leases
	rounds   int
	granted  atomic.Bool // a member, since the last round began
	late     int         // rounds whose majority was over before its confirmation came
	split    int         // consecutive rounds that acquired some members, but no majority
	over     time.Time   // the end of the last round
	early    bool        // that round was granted a member before its end
	sent     time.Time   // the first request of the round that succeeded
	round    *round
	answers  error          // of the servers in the last round, if that was not decisive
	cohort   *engine.Cohort // shared by the holds that pass on the members, or nil
}

// begin makes a hold of an attempt that has succeeded.
func (h *redHold) begin(ctx context.Context, o lock.Options) error {
	h.groupHold.begin(ctx, o)
	if h.cohort != nil && o.MaxHold > 0 {
		o.MaxHold += time.Since(h.sent) // MaxHold counts from the hand-off
	}
	terms := watchdog.Terms{Sent: h.sent, TTL: h.ttl - drift(h.ttl), MaxHold: o.MaxHold}
	if o.Lease == 0 {
		terms.Renewer = redRenewer{}
	}
	h.Lease.Exact = true
	watched := h.r.s.Watchdog.Watch(&h.Lease, h, terms)
	if h.cohort.Gone() {
		h.Lost(lock.ReasonGone, nil) // the loss may have preceded Watch
	}
	if !watched || h.r.s.Err() != nil {
		return errors.Join(lock.ErrClosed, h.Unlock(ctx))
	}
	if ctx.Err() != nil {
		return errors.Join(lock.ErrNotAcquired, h.unlockSoon(ctx))
	}
	if time.Since(h.sent) >= terms.TTL {
		return errors.Join(engine.Late(1, false, h.ttl, h.sent), h.unlockSoon(ctx))
	}

	return nil
}

// KeepUntil implements engine.AnyHold.
func (h *redHold) KeepUntil(until time.Time) {
	h.groupHold.KeepUntil(until)
	if !until.IsZero() {
		h.passable.Store(false)
	}
}

// Context implements lock.Hold.
func (h *redHold) Context() context.Context { return h.ContextOf(h) }

// Break implements engine.ContextHold.
func (h *redHold) Break(reason lock.Reason) bool {
	h.Lease.Check()
	h.Lease.Forget()
	if !h.lose(reason, nil) {
		return false
	}
	receivers, _ := h.release(context.Background(), time.Now().Add(engine.UnlockTimeout))
	h.r.queues().Released(h.r.key, h, engine.Release{Receivers: receivers})
	return true
}

// unlockSoon unlocks a hold that its caller does not get, in the background if that takes long.
func (h *redHold) unlockSoon(ctx context.Context) error {
	return h.r.s.Undo(ctx, engine.UnlockTimeout, func() error { return h.Unlock(ctx) })
}

// Dropped implements engine.Droppable.
func (h *redHold) Dropped() {
	h.dropped()
	h.Lease.StopRenewing()
	for i := range h.r.members {
		if member := h.round.hold(i); member != nil {
			member.Disown()
		}
	}
}

// Leased implements watchdog.Holder.
func (h *redHold) Leased() watchdog.Subject { return watchdog.Subject{Holder: h} }

// Lost implements watchdog.Holder.
func (h *redHold) Lost(reason lock.Reason, cause error) {
	lost := h.lose(reason, cause)
	h.Lease.Forget() // after that, Check would not wait for this
	if !lost {
		return
	}

	// After MaxHold, or while the client is closing, the work may not have stopped yet, so the
	// members are left to their leases or to Unlock.
	if reason != lock.ReasonMaxHold && reason != lock.ReasonClosed {
		h.r.s.Go(func(context.Context) { h.undo(context.Background()) }) // the watchdog does not wait
	}
	h.r.queues().Ended(h.r.key, h)
}

func (r *Red) queues() *engine.Queues { return &r.all.e.Queues }

// Owner implements lock.Hold. It also hides the field of the lease.
func (h *redHold) Owner() lock.Owner { return h.owner }

// One implements engine.AnyHold: it is on several locks.
func (h *redHold) One() *engine.Hold { return nil }

// Acquired implements engine.GroupHold.
func (h *redHold) Acquired() time.Time { return h.sent }

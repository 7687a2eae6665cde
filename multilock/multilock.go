// Package multilock makes one lock of many: Multi holds all of its members, Red a
// majority of them.
//
// # Multi
//
// A Multi is for work that needs several things at once: two accounts, an order and
// its stock. It holds all of them or none. Members may be locks of any kind, on any
// servers.
//
// Two callers that want the same locks in different orders do not block each other for
// ever: members are taken in one order everywhere, whatever the order given, by server
// and name. Where that order is not the same everywhere, because a server has been
// restarted in between or because somebody takes the locks by hand, whoever has waited
// for a member for long gives up the others and begins again.
//
// Reentrant locks (rlock.Lock) that live on one server, and in a cluster in one slot,
// are taken and released by one script. Give the names a common hash tag there:
// "{order-7}:stock" and "{order-7}:invoice".
//
// # Red
//
// A Red is one lock on several independent servers, held by whoever has a majority of
// them: the Redlock algorithm (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
// It outlives the loss of a minority of the servers without a failover. Over plain
// locks (Client.PlainLock) it is the Redlock of other libraries, such as redsync.
//
// What it is good for has been argued about since 2016. Martin Kleppmann's point ("How to do
// distributed locking") is that no lock with a lease excludes anybody: a process can
// stop between looking at the time and writing, for longer than its lease. What protects
// a resource is a fencing token, a number that grows with each acquisition and that the
// resource compares; Redlock has none, and cannot have one, since a counter on one of
// the servers can be lost with that server, and counters on several servers are not one
// counter. Moreover Redlock needs clocks that advance at nearly the same rate, pauses that are
// short against the lease, and servers that do not forget. Salvatore Sanfilippo answered ("Is
// Redlock safe?") that a process which looks at the time after it has a majority, as the
// algorithm asks, knows of any delay before that; that a pause after that hurts
// every lock with a lease, fenced ones too unless the resource can compare tokens, and one that
// can might not need the lock; and that monotonic clocks and a restart later than the
// longest lease make the assumptions reasonable. Both are right about what they say. It comes to this:
//
//   - For efficiency, so that work is not done twice, one server and rlock.Lock will
//     do. It is simpler, and one request instead of one for each server.
//   - For availability without failover, Red is better than a replicated server, whose
//     failover can forget a lock.
//   - For correctness take rlock.Fenced, and let the resource check the token. If it
//     cannot, no lock with a lease is enough, this one included; a consensus system
//     (etcd, ZooKeeper) does not change that either.
//
// A server that has lost its data must stay away for longer than the longest lease
// before it comes back, or two majorities can overlap in what it has forgotten. Red
// cannot enforce that.
package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Multi is several locks taken as one. It is made by Client.MultiLock.
type Multi struct {
	whole
	known    []place            // the members in order, as far as that is known without asking
	sessions []*session.Session // of the members
}

// New returns the lock that is all of the given ones. Members that are a Multi stand for
// their own members. It is called by the client.
func New(s *session.Session, members ...lock.Locker) *Multi {
	var flat []lock.Locker
	var bad error
	for _, m := range members {
		if multi, ok := m.(*Multi); ok && multi != nil {
			flat, bad = append(flat, multi.members...), cmp.Or(bad, multi.err)
		} else {
			flat = append(flat, m)
		}
	}
	m := &Multi{whole: newWhole(s, "multi", flat)}
	if m.err = cmp.Or(m.err, bad); m.err != nil {
		return m
	}
	m.known = m.places(nil)
	m.err = noTwins(m.known)
	for _, p := range m.known {
		if p.lock != nil && !slices.Contains(m.sessions, p.lock.Session()) {
			m.sessions = append(m.sessions, p.lock.Session())
		}
	}
	return m
}

// Name returns the names of the members, separated by commas.
func (m *Multi) Name() string { return m.is.Name }

// Lock takes all members, waiting for one after the other, until it has them, ctx ends, or
// lock.Wait runs out. See lock.Locker for its errors; on failure no member is
// left behind. A member that is nil, or there twice, or none at all is an error that
// matches lock.ErrInvalid.
//
// A lease counts from when the last member was taken, for all of them, and so does
// lock.MaxHold. Members that are a Red, or no lock of redlatch, are taken with the lease as
// it is and before the others: if one of these is waited for longer than that, they are taken
// anew. The hold's context ends when any member is lost; the others are given back
// then. Its Owner is the one that ctx names, and otherwise zero: each member has an
// owner of its own. It has no fencing token.
func (m *Multi) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	return m.acquire(ctx, o, o.Bounded && o.Wait == 0)
}

// TryLock makes one attempt for each member and does not wait: if somebody else has one
// of them it gives back those it has got, and the error matches lock.ErrNotAcquired.
// See Lock.
func (m *Multi) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := locking.TryOptions(opts)
	if err != nil {
		return nil, err
	}
	return m.acquire(ctx, o, true)
}

// Do runs fn while it holds all members. See lock.Locker.
func (m *Multi) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, m, fn, opts...)
}

// namedHolds are the holds of a client whose owners were named, by these. The zero value
// is ready for use.
type namedHolds struct {
	mu    sync.Mutex
	holds map[lock.Owner][]*multiHold
}

// of returns those of an owner, the latest last.
func (n *namedHolds) of(o lock.Owner) []*multiHold {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.holds[o])
}

func (n *namedHolds) add(h *multiHold) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.holds == nil {
		n.holds = make(map[lock.Owner][]*multiHold)
	}
	n.holds[h.owner] = append(n.holds[h.owner], h)
}

func (n *namedHolds) remove(h *multiHold) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holds[h.owner] = slices.DeleteFunc(n.holds[h.owner], func(other *multiHold) bool { return other == h })
	if len(n.holds[h.owner]) == 0 {
		delete(n.holds, h.owner)
	}
}

// sameAs reports whether two have the same members.
func (m *Multi) sameAs(other *Multi) bool {
	return slices.EqualFunc(m.known, other.known, place.is)
}

// ofOwner is a Locker that knows its owners, as all those of redlatch but a Red.
type ofOwner interface {
	Unlock(ctx context.Context) error
	IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error)
}

// Unlock gives back one hold of each member for the owner that ctx names (see
// lock.WithOwner), as the Unlock of its kind does, and joins the errors. The latest hold
// that this owner has through a Multi of this client with the same members ends. A member
// that has no such method is an error that matches lock.ErrUnsupported.
func (m *Multi) Unlock(ctx context.Context) error {
	if ctx != nil && m.err == nil {
		owner, _ := lock.OwnerFrom(ctx)
		for _, h := range slices.Backward(session.Of[namedHolds](m.s).of(owner)) {
			if !h.m.sameAs(m) {
				continue
			}
			if err := h.unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
				return err
			}
		}
	}
	var errs []error
	err := m.eachOwned(func(l ofOwner) bool {
		errs = append(errs, l.Unlock(ctx))
		return true
	})
	return errors.Join(append(errs, err)...)
}

// IsHeldBy reports whether owner holds all members. It blocks for a round trip for each
// of them. A member that cannot tell is an error that matches lock.ErrUnsupported.
func (m *Multi) IsHeldBy(ctx context.Context, owner lock.Owner) (held bool, err error) {
	var failed error
	err = m.eachOwned(func(l ofOwner) bool {
		held, failed = l.IsHeldBy(ctx, owner)
		return held && failed == nil
	})
	err = errors.Join(err, failed)
	return held && err == nil, err
}

// eachOwned calls f for the members, the last one first, until it returns false.
func (m *Multi) eachOwned(f func(l ofOwner) bool) error {
	if m.err != nil {
		return m.err
	}
	for _, member := range m.members {
		if _, ok := member.(ofOwner); !ok {
			return fmt.Errorf("%w: %q does not know its owners", lock.ErrUnsupported, member.Name())
		}
	}
	for _, member := range slices.Backward(m.members) {
		if !f(member.(ofOwner)) {
			break
		}
	}
	return nil
}

// place is where a member stands in the order of all locks.
type place struct {
	member lock.Locker
	lock   *locking.Lock // nil if it is of somebody else
	server session.Server
	slot   int
	key    string
}

// known is 1 if it is known where the lock is, and otherwise 0.
func (p place) known() int {
	if p.lock == nil {
		return 0
	}
	return 1
}

// places returns the members in the order in which everybody takes them: those of which
// nothing is known but their names, and then by server, slot and key. The locks of clients
// that are not in servers come first among these.
func (m *Multi) places(servers map[*session.Session]session.Server) []place {
	all := make([]place, len(m.members))
	for i, member := range m.members {
		p := place{member: member, key: member.Name()}
		if l, ok := locking.Find(member); ok {
			p.lock, p.key, p.server = l, l.Key(), servers[l.Session()]
			if l.Session().Cluster() {
				p.slot = wire.Slot(p.key)
			}
		}
		all[i] = p
	}
	slices.SortStableFunc(all, func(a, b place) int {
		return cmp.Or(
			cmp.Compare(a.known(), b.known()), cmp.Compare(a.server.ID, b.server.ID), cmp.Compare(a.server.Database, b.server.Database),
			cmp.Compare(a.slot, b.slot), cmp.Compare(a.key, b.key))
	})
	return all
}

// is reports whether two places are known to be of one lock.
func (p place) is(q place) bool {
	switch {
	case p.key != q.key:
		return false
	case p.lock != nil && q.lock != nil:
		return p.lock.Session() == q.lock.Session() || p.server == q.server && p.server.ID != ""
	default:
		return same(p.member, q.member)
	}
}

// noTwins returns an error if two of the members, which are in order, are one.
func noTwins(all []place) error {
	for i, p := range all {
		if slices.ContainsFunc(all[:i], p.is) {
			return fmt.Errorf("%w: lock %q is there twice", lock.ErrInvalid, p.member.Name())
		}
	}
	return nil
}

// inOrder returns the members in order, asking servers who they are if there are several.
func (m *Multi) inOrder(ctx context.Context) ([]place, error) {
	for _, p := range m.known {
		if p.lock == nil {
			continue
		}
		if err := p.lock.Check(ctx); err != nil {
			return nil, err
		}
	}
	if len(m.sessions) < 2 {
		return m.known, nil
	}
	answers := make([]session.Server, len(m.sessions))
	var asked sync.WaitGroup
	for i, s := range m.sessions {
		if answers[i] = s.KnownServer(); answers[i].ID != "" {
			continue
		}
		// Which order it is in matters little if it does not answer: it cannot be locked
		// either.
		asked.Go(func() { answers[i], _ = s.Server(ctx) })
	}
	asked.Wait()
	servers := make(map[*session.Session]session.Server)
	for i, s := range m.sessions {
		servers[s] = answers[i]
	}
	all := m.places(servers)
	return all, noTwins(all)
}

const (
	// standOff is for how long, and up to twice as long, somebody waits for a member
	// while it has others.
	standOff = 5 * time.Second
	// maxPause is how long is paused at most before members are taken anew.
	maxPause = 50 * time.Millisecond
	// maxGiveBack is for how long a caller who gets nothing waits until what was taken is
	// given back, should the server not answer.
	maxGiveBack = time.Second
)

// errAgain says that the members have to be taken anew.
var errAgain = errors.New("redlatch: members were given up in between")

func (m *Multi) acquire(ctx context.Context, o lock.Options, once bool) (lock.Hold, error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	take := taking{o: o, once: once}
	if o.Bounded && !once {
		take.deadline = time.Now().Add(o.Wait)
	}
	spanCtx, span := m.s.Telemetry.StartAcquire(ctx, m.is)
	// The members' holds end with the whole, and not with the caller's context.
	takeCtx, cancel := context.WithCancelCause(context.WithoutCancel(spanCtx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	h, rounds, err := m.acquireUnder(ctx, takeCtx, cancel, &take, stop)
	span.End(ctx, rounds, take.waited || errors.Is(err, lock.ErrNotAcquired), err)
	if err != nil {
		stop()
		cancel(err)
		return nil, err
	}
	return h, nil
}

// acquireUnder takes the members under takeCtx, which it ends with cancel if a client
// is closed. It keeps the connections of the clients open until then. stop says that ctx
// matters to takeCtx no longer.
func (m *Multi) acquireUnder(ctx, takeCtx context.Context, cancel context.CancelCauseFunc, t *taking, stop func() bool) (h lock.Hold, rounds int, err error) {
	clients := m.sessions
	if !slices.Contains(clients, m.s) {
		clients = append(slices.Clone(clients), m.s)
	}
	for _, s := range clients {
		leave, open := s.Join(func() { cancel(lock.ErrClosed) })
		if !open {
			return nil, 0, lock.ErrClosed
		}
		defer leave()
	}
	for rounds = 1; ; rounds++ {
		parts, err := m.take(takeCtx, t)
		if err == nil && (!stop() || takeCtx.Err() != nil) {
			err = errors.Join(lock.ErrNotAcquired, cmp.Or(context.Cause(ctx), context.Cause(takeCtx)))
		}
		if err == nil {
			return m.begin(ctx, parts), rounds, nil
		}
		back := m.giveBack(ctx, parts)
		if errors.Is(err, errAgain) {
			if t.once {
				err = lock.ErrNotAcquired
			} else if err = t.pause(takeCtx); err == nil {
				continue
			}
		}
		return nil, rounds, errors.Join(t.inTime(takeCtx, err), back)
	}
}

// giveBack gives back what was taken of a whole that is not to be had.
func (m *Multi) giveBack(ctx context.Context, parts []lock.Hold) error {
	if len(parts) == 0 {
		return nil
	}
	var leaves []func()
	for _, s := range m.sessions { // this may last for longer than the acquisition
		if leave, open := s.Join(func() {}); open {
			leaves = append(leaves, leave)
		}
	}
	done := make(chan error, 1)
	giveBack := func(context.Context) {
		done <- exceptLost(locking.GiveBack(context.WithoutCancel(ctx), parts))
		for _, leave := range leaves {
			leave()
		}
	}
	if !m.s.Go(giveBack) { // the client is being closed, and waits for this
		giveBack(ctx)
	}
	select {
	case err := <-done:
		return err
	case <-time.After(maxGiveBack):
		return fmt.Errorf("%w: give back %q", lock.ErrIndeterminate, m.is.Name)
	}
}

// taking is what an acquisition knows from one round to the next.
type taking struct {
	o        lock.Options
	once     bool
	deadline time.Time
	waited   bool
}

// left returns the options for the next member.
func (t *taking) left() lock.Options {
	o := t.o
	if !t.deadline.IsZero() {
		o.Wait = max(0, time.Until(t.deadline))
	}
	return o
}

// requests returns the context of requests that are not to last longer than the wait.
func (t *taking) requests(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.deadline.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, t.deadline)
}

// inTime returns the error of an acquisition: if there was no time left when a request
// failed it says that first.
func (t *taking) inTime(ctx context.Context, err error) error {
	switch {
	case errors.Is(context.Cause(ctx), lock.ErrClosed):
		return lock.ErrClosed
	case errors.Is(err, lock.ErrNotAcquired), errors.Is(err, lock.ErrClosed):
		return err
	case ctx.Err() != nil:
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx), err)
	case !t.deadline.IsZero() && !time.Now().Before(t.deadline):
		return errors.Join(lock.ErrNotAcquired, err)
	default:
		return err
	}
}

// pause waits a little before the next round, or returns why there is none.
func (t *taking) pause(ctx context.Context) error {
	t.waited = true
	pause := rand.N(maxPause)
	if !t.deadline.IsZero() {
		pause = min(pause, time.Until(t.deadline))
	}
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	if !t.deadline.IsZero() && !time.Now().Before(t.deadline) {
		return lock.ErrNotAcquired
	}
	return nil
}

// take takes all members. It returns the holds also with an error, for them to be given
// back: it is errAgain if another try may do it.
func (m *Multi) take(ctx context.Context, t *taking) ([]lock.Hold, error) {
	reqCtx, cancel := t.requests(ctx)
	defer cancel()
	all, err := m.inOrder(reqCtx)
	if err != nil {
		return nil, err
	}
	var parts []lock.Hold
	for len(parts) < len(all) {
		if t.once {
			parts, err = tryNext(ctx, parts, all[len(parts):], t)
		} else {
			parts, err = waitNext(ctx, parts, all[len(parts):], t)
		}
		if err != nil {
			return parts, err
		}
	}
	if err := locking.Settle(reqCtx, parts, t.o); err != nil {
		if errors.Is(err, lock.ErrLost) {
			err = errAgain
		}
		return parts, err
	}
	for _, h := range parts {
		if h.Remaining() == 0 { // while others were waited for
			return parts, errAgain
		}
	}
	return parts, nil
}

// together returns the locks among the first members that one script can take.
func together(ctx context.Context, next []place) []*locking.Lock {
	if len(next) < 2 {
		return nil
	}
	locks := make([]*locking.Lock, 0, len(next))
	for _, p := range next {
		if p.lock == nil {
			break
		}
		locks = append(locks, p.lock)
	}
	if len(locks) < 2 {
		return nil
	}
	if n := locking.Together(ctx, locks); n > 1 {
		return locks[:n]
	}
	return nil
}

// tryNext makes an attempt for the first of the next members, or for some that can be
// taken together.
func tryNext(ctx context.Context, parts []lock.Hold, next []place, t *taking) ([]lock.Hold, error) {
	if locks := together(ctx, next); locks != nil {
		got, err := locking.TakeTogether(ctx, locks, t.o, true)
		if err == nil && len(got) < len(locks) {
			err = lock.ErrNotAcquired
		}
		if !refused(err) {
			return append(parts, got...), err
		}
		// By itself, each says what is wrong with it.
	}
	h, err := next[0].take(ctx, t.o, true)
	if err != nil {
		return parts, err
	}
	return append(parts, h), nil
}

// refused reports whether err is an answer of the server that it would give again.
func refused(err error) bool {
	reply := (*rueidis.RedisError)(nil)
	return errors.As(err, &reply) && wire.OutcomeOf(reply) == wire.Refused
}

// waitNext takes as many of the next members as can be had at once, or waits for the
// first of them.
func waitNext(ctx context.Context, parts []lock.Hold, next []place, t *taking) ([]lock.Hold, error) {
	o := t.left()
	if o.Bounded && o.Wait == 0 {
		return parts, lock.ErrNotAcquired
	}
	if locks := together(ctx, next); locks != nil {
		got, err := locking.TakeTogether(ctx, locks, o, false)
		parts, next = append(parts, got...), next[len(got):]
		if len(got) == len(locks) || errors.Is(err, lock.ErrClosed) || err != nil && ctx.Err() != nil {
			return parts, err
		}
		t.waited = true
		if o = t.left(); o.Bounded && o.Wait == 0 {
			return parts, errors.Join(lock.ErrNotAcquired, err)
		}
	}
	bounded := false // by us
	if len(parts) > 0 {
		if patience := standOff + rand.N(standOff); !o.Bounded || o.Wait > patience {
			o.Wait, o.Bounded, bounded = patience, true, true
		}
	}
	h, err := next[0].take(ctx, o, false)
	switch {
	case err == nil:
		t.waited = t.waited || locking.Waited(h)
		return append(parts, h), nil
	case bounded && errors.Is(err, lock.ErrNotAcquired) && ctx.Err() == nil:
		return parts, errAgain
	default:
		return parts, err
	}
}

// take takes one member as part of the whole.
func (p place) take(ctx context.Context, o lock.Options, once bool) (lock.Hold, error) {
	if p.lock != nil {
		return locking.Take(ctx, p.lock, o, once)
	}
	var opts []lock.Option
	if o.Lease > 0 {
		opts = append(opts, lock.Lease(o.Lease))
	}
	if o.MaxHold > 0 {
		opts = append(opts, lock.MaxHold(o.MaxHold))
	}
	if once {
		return p.member.TryLock(ctx, opts...)
	}
	if o.Bounded {
		opts = append(opts, lock.Wait(o.Wait))
	}
	return p.member.Lock(ctx, opts...)
}

var joinedType = reflect.TypeOf(errors.Join(lock.ErrLost))

// exceptLost returns what of an error is not the loss of a hold.
func exceptLost(err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok && reflect.TypeOf(err) == joinedType {
		var rest []error
		for _, e := range joined.Unwrap() {
			rest = append(rest, exceptLost(e))
		}
		return errors.Join(rest...)
	}
	if errors.Is(err, lock.ErrLost) {
		return nil
	}
	return err
}

// multiHold is a hold on all members.
type multiHold struct {
	life
	m     *Multi
	parts []lock.Hold
	stops []func() bool // of what listens for the ends of parts that are not of this module

	freed chan struct{} // closed when the parts of a hold that was lost are given back
}

func (m *Multi) begin(ctx context.Context, parts []lock.Hold) lock.Hold {
	h := &multiHold{life: life{of: &m.whole}, m: m, parts: parts, freed: make(chan struct{})}
	h.life.begin(ctx)
	if !h.owner.IsZero() {
		session.Of[namedHolds](m.s).add(h)
	}
	if !slices.Contains(m.sessions, m.s) { // else its own members tell
		h.stops = append(h.stops, m.s.OnClose(func() {
			h.PartEnded(&lock.LostError{Name: h.of.is.Name, Owner: h.owner, Reason: lock.ReasonClosed, When: time.Now()})
		}))
	}
	for _, p := range parts {
		if locking.Watch(p, h) {
			continue
		}
		partCtx := p.Context()
		h.stops = append(h.stops, context.AfterFunc(partCtx, func() {
			cause := &lock.LostError{Name: p.Name(), Owner: p.Owner(), Reason: lock.ReasonGone, When: time.Now()}
			errors.As(context.Cause(partCtx), &cause)
			h.PartEnded(cause)
		}))
	}
	return newHandle(h)
}

// forget is called when the hold has ended.
func (h *multiHold) forget() {
	if !h.owner.IsZero() {
		session.Of[namedHolds](h.m.s).remove(h)
	}
}

func (h *multiHold) alive() *life { return &h.life }

// PartEnded implements locking.Whole.
func (h *multiHold) PartEnded(cause *lock.LostError) {
	if !h.lose(cause.Reason, cause) {
		return
	}
	h.forget()
	h.background(func(context.Context) {
		defer close(h.freed)
		if cause.Reason == lock.ReasonMaxHold {
			return // the work under it may not have noticed yet: they are left to Unlock
		}
		parts := h.parts
		if cause.Reason == lock.ReasonClosed { // which leaves what it has to the leases
			parts = locking.OfOpenClients(parts)
		}
		_ = locking.UnlockTogether(context.WithoutCancel(h.ctx), parts)
	})
}

func (h *multiHold) remaining() time.Duration {
	if h.current("") != nil {
		return 0
	}
	least := lock.MaxLease
	for _, p := range h.parts {
		least = min(least, p.Remaining())
	}
	return least
}

func (h *multiHold) extend(ctx context.Context, lease time.Duration) error {
	if err := h.current("Extend"); err != nil {
		return err
	}
	err := errors.Join(locking.ExtendTogether(ctx, h.parts, lease, true)...)
	if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
		h.PartEnded(lost)
	}
	return cmp.Or(h.current("Extend"), err)
}

func (h *multiHold) unlock(ctx context.Context) error {
	err := h.end()
	for _, p := range h.parts {
		locking.Unwatch(p)
	}
	for _, stop := range h.stops {
		stop()
	}
	if err != nil {
		if errors.Is(err, lock.ErrLost) {
			<-h.freed
			_ = locking.UnlockTogether(context.WithoutCancel(ctx), h.parts) // what is left of them
		}
		return err
	}
	h.forget()
	ctx, done := h.span.StartRelease(ctx)
	return h.released(locking.UnlockTogether(context.WithoutCancel(ctx), h.parts), done)
}

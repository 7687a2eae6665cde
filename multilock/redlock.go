package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// Red is a lock that is held by whoever holds a majority of its members, each on a
// server of its own. It is made by Client.RedLock. See the package documentation for
// when to use it.
type Red struct {
	whole
	known   []*locking.Lock // what the members stand on, nil where that is not known
	quorum  int
	timeout time.Duration // 0: as serverTimeout says
	queue   string        // the name of the local queue
	channel string        // of releases, "" if there is none that the session can hear
	shared  bool          // whether others can hold it at the same time, as readers
}

// NewRed returns the lock that is a majority of the given ones. It is called by the
// client.
func NewRed(s *session.Session, members ...lock.Locker) *Red {
	r := &Red{whole: newWhole(s, "red", members), quorum: len(members)/2 + 1, shared: true}
	if r.err != nil {
		return r
	}
	var (
		id       strings.Builder
		sessions []*session.Session
	)
	for i, m := range members {
		if of := compound(m); of != "" {
			r.err = fmt.Errorf("%w: a red lock of a %s lock", lock.ErrInvalid, of)
			return r
		}
		l, ok := locking.Find(m)
		if !ok {
			r.known = append(r.known, nil)
			if slices.ContainsFunc(members[:i], func(other lock.Locker) bool { return same(m, other) }) {
				r.err = fmt.Errorf("%w: lock %q is there twice in a red lock", lock.ErrInvalid, m.Name())
				return r
			}
			if reflect.ValueOf(m).Kind() == reflect.Pointer {
				fmt.Fprintf(&id, "%p ", m)
			}
			fmt.Fprintf(&id, "%T %q;", m, m.Name())
			r.shared = false
			continue
		}
		if slices.Contains(sessions, l.Session()) {
			r.err = fmt.Errorf("%w: two members of the red lock %q are of one client: each needs a server of its own", lock.ErrInvalid, r.is.Name)
			return r
		}
		r.known = append(r.known, l)
		sessions = append(sessions, l.Session())
		if l.Session() == s {
			r.channel = l.Channel()
		}
		r.shared = r.shared && l.Shared()
		fmt.Fprintf(&id, "%s %s %q;", l.Kind(), l.Session().ID, l.Key())
	}
	r.queue = id.String()
	if n := len(members); n%2 == 0 {
		warnOnce(s, n, r.is.Name)
	}
	return r
}

// same reports whether two members that nothing is known of are one.
func same(a, b lock.Locker) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

func compound(m lock.Locker) string {
	switch m.(type) {
	case *Multi:
		return "multi"
	case *Red:
		return "red"
	}
	return ""
}

// warned are the numbers of servers that have been warned of. The zero value is ready for
// use.
type warned struct{ sizes sync.Map }

func warnOnce(s *session.Session, n int, name string) {
	if _, before := session.Of[warned](s).sizes.LoadOrStore(n, true); !before {
		s.Logger.Warn("redlatch: a red lock of an even number of servers survives the loss of no more of them than one less",
			"name", name, "servers", n)
	}
}

// WithTimeout returns the same lock with another time for which a server is waited for
// when the lock is taken. It is small against the lease: who waits for a server that
// does not answer has less of it left. Without it that is a twentieth of the lease,
// but from 50 ms to a second. A timeout that is not greater than zero is an error of every method.
func (r *Red) WithTimeout(perServer time.Duration) *Red {
	other := *r
	other.timeout = perServer
	if perServer <= 0 && other.err == nil {
		other.err = fmt.Errorf("%w: the timeout %v of a red lock: must be greater than zero", lock.ErrInvalid, perServer)
	}
	return &other
}

const (
	leastTimeout = 50 * time.Millisecond
	mostTimeout  = time.Second
)

// serverTimeout is how long a server is waited for: never until the lease would be over.
func (r *Red) serverTimeout(lease time.Duration) time.Duration {
	return min(cmp.Or(r.timeout, min(max(lease/20, leastTimeout), mostTimeout)), lease-drift(lease))
}

// drift is how much earlier than its lease the lock is taken for lost: clocks of servers
// may be faster than this one.
func drift(lease time.Duration) time.Duration { return lease/100 + 2*time.Millisecond }

// Name returns the name of the members, or their names if they have different ones.
func (r *Red) Name() string { return r.is.Name }

// Lock takes a majority of the members, waiting until that is possible, ctx ends, or
// lock.Wait runs out. Members are asked at the same time, each for as long as
// WithTimeout says at most, and Lock returns as soon as a majority has been got; those that
// answer later are part of the hold too. Whoever gets less gives everything back and
// tries again after a random pause that grows.
//
// The hold is certain for the lease, less the time that it took to acquire, less 1 % of
// the lease and 2 ms for clocks that do not run alike (Hold.Remaining). When it is
// renewed, members that are missing are taken again; it is lost unless a majority has
// confirmed the renewal in time. Without lock.Lease the lease is the watchdog timeout of
// the client that has made r. One of which nothing would be left is an error that matches
// lock.ErrInvalid: it is more than 2 ms.
//
// See lock.Locker for its errors. If so many servers do not answer that there can be
// no majority, Lock goes on for that watchdog timeout, and then the error matches
// lock.ErrNotAcquired and says what the servers said. Two members on the same server are an
// error that matches lock.ErrInvalid. The hold's Owner is the one that ctx names,
// and otherwise zero. It has no fencing token.
func (r *Red) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	return r.acquire(ctx, o, o.Bounded && o.Wait == 0)
}

// TryLock asks every member once. Without a majority it gives back what it has got, and
// the error matches lock.ErrNotAcquired. It blocks for the slowest server that it has to
// wait for, but not longer than twice the time that WithTimeout is about. See Lock.
func (r *Red) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := locking.TryOptions(opts)
	if err != nil {
		return nil, err
	}
	return r.acquire(ctx, o, true)
}

// Do runs fn while it holds the lock. See lock.Locker.
func (r *Red) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, r, fn, opts...)
}

// splitBackoff is the pause after the n-th attempt that has got no majority. Those who
// have split the votes come back at different times.
func splitBackoff(n int) time.Duration {
	const first, longest = 4 * time.Millisecond, 500 * time.Millisecond
	return time.Millisecond + rand.N(min(first<<min(n, 10), longest))
}

func (r *Red) acquire(ctx context.Context, o lock.Options, once bool) (lock.Hold, error) {
	if err := r.check(ctx); err != nil {
		return nil, err
	}
	for _, l := range r.known {
		if l == nil {
			continue
		}
		if err := l.Check(ctx); errors.Is(err, lock.ErrInvalid) {
			return nil, err
		}
	}
	h := &redHold{
		life: life{of: &r.whole}, r: r, once: once, ttl: cmp.Or(o.Lease, r.s.WatchdogTimeout),
		ballot: &ballot{r: r, members: make([]redMember, len(r.members)), changed: make(chan struct{}, 1)},
	}
	if h.ttl <= drift(h.ttl) {
		return nil, fmt.Errorf("%w: lease %v: that of a red lock must be more than %v", lock.ErrInvalid, h.ttl, drift(h.ttl))
	}
	_, h.named = lock.OwnerFrom(ctx)
	h.fixed = o.Lease > 0
	req := queue.Request{
		Key: h.key(), Acquirer: h, Channel: r.channel, Backoff: splitBackoff,
		Once: once, MayHold: h.named, NoHandOff: !h.plain(), Eager: r.shared, Shared: r.shared,
	}
	if o.Bounded && !once {
		h.deadline = time.Now().Add(o.Wait)
		req.Deadline = h.deadline
	}
	if !r.s.Enter() {
		return nil, lock.ErrClosed
	}
	defer r.s.Leave()
	spanCtx, span := r.s.Telemetry.StartAcquire(ctx, r.is)
	if r.s.Telemetry != nil {
		req.OnWake = span.Woken
	}
	err := r.s.Queues.Acquire(spanCtx, req)
	if err == nil {
		err = h.begin(ctx, o)
	}
	span.End(ctx, h.rounds, h.rounds != 1 || errors.Is(err, lock.ErrNotAcquired), err)
	if err != nil {
		return nil, err
	}
	return newHandle(h), nil
}

// redHold is a hold on a majority, or the attempt to get one.
type redHold struct {
	life
	r        *Red
	once     bool
	named    bool
	fixed    bool          // not renewed
	deadline time.Time     // of Wait
	ttl      time.Duration // of the members' leases
	rounds   int
	split    int       // rounds in a row that have got some members, and not enough
	again    time.Time // when the next round may begin
	sent     time.Time // when the round that succeeded began
	lease    watchdog.Lease
	relay    *locking.Relay // of the members, if they are passed on as they are
	extended atomic.Bool    // by the caller

	*ballot
}

// ballot is what the members have answered. It goes from hold to hold when these are
// passed on as they are.
type ballot struct {
	r       *Red
	votes   sync.Mutex
	round   int // the current one; what answers to an earlier one is given back
	members []redMember
	changed chan struct{} // has room for one; told of every answer
}

// redMember is what is known of a member. A hold of it is here from when the server has
// confirmed it until it is given back or found lost.
type redMember struct {
	part   *redPart
	asking bool // an attempt is under way
	err    error
}

// redPart is the hold of a member. It is told from others by its address: of a hold that
// is not ours it is not known whether it can be compared.
type redPart struct{ lock.Hold }

// Try implements queue.Acquirer: it is one round of the algorithm.
func (h *redHold) Try(ctx context.Context) (queue.Verdict, error) {
	if err := h.r.s.Err(); err != nil {
		return queue.Verdict{}, err
	}
	if !h.pause(ctx) {
		return queue.Verdict{FreeIn: -1}, nil // the queue says why
	}
	h.rounds++
	if err := h.r.twins(); err != nil {
		return queue.Verdict{}, err
	}
	sent := time.Now()
	yes, decided := h.poll(ctx)
	twins := h.r.twins() // by now more may be known
	if twins == nil && yes >= h.r.quorum && time.Since(sent) < h.ttl-drift(h.ttl) {
		h.sent = sent
		return queue.Verdict{Acquired: true}, nil
	}
	err := h.giveUp(decided)
	switch {
	case twins != nil:
		return queue.Verdict{}, twins
	case h.r.s.Err() != nil:
		return queue.Verdict{}, lock.ErrClosed
	case h.once && err == nil:
		err = lock.ErrNotAcquired
	case !h.once && h.rounds == 1 && errors.As(err, new(*queue.Unavailable)):
		err = nil // that of a first attempt would be the last
	}
	return queue.Verdict{FreeIn: -1}, err
}

// poll asks all members and returns how many are held once it is decided whether they are
// a majority, or there is no more time.
func (h *redHold) poll(ctx context.Context) (yes int, decided bool) {
	patience, cancel := context.WithTimeout(ctx, h.soon(h.r.serverTimeout(h.ttl)))
	defer cancel()
	round, b := h.newRound(), h.ballot
	for i := range h.members {
		h.ask(ctx, i, round, h.ttl)
	}
	began := time.Now()
	// after tells when it is over that others are waited for, as long again as it has taken
	// so far, and more.
	after := func(over *atomic.Bool, d time.Duration) *time.Timer {
		return time.AfterFunc(max(d, 4*time.Since(began)), func() {
			over.Store(true)
			b.tell()
		})
	}
	var hurry, met struct {
		timer *time.Timer
		over  atomic.Bool
	}
	for {
		yes, taken, open := h.count()
		switch {
		case yes+open < h.r.quorum:
			return yes, true
		case yes >= h.r.quorum && (met.over.Load() || !h.strangers()):
			return yes, true
		case yes >= h.r.quorum && met.timer == nil:
			met.timer = after(&met.over, minIntroduction)
			defer met.timer.Stop()
		case yes >= h.r.quorum:
		case hurry.over.Load():
			return yes, true
		case taken > 0 && hurry.timer == nil && !h.once:
			hurry.timer = after(&hurry.over, minHurry<<min(h.rounds, 16))
			defer hurry.timer.Stop()
		}
		select {
		case <-h.changed:
			continue
		case <-patience.Done():
		case <-h.r.s.Done():
		}
		yes, _, _ = h.count()
		return yes, false
	}
}

// pause waits until the next round may begin. What the last one has given back makes
// the members' servers publish, and who listens would be back at once, and split the
// votes again. It reports whether there is a next round.
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

// minHurry is for how long at least other answers are waited for in a round once somebody
// else has a member: that one may be short of the votes that are here, and those who have
// not answered by then may be away. Each round is more patient than the one before, should
// the others only be far away.
const minHurry = 5 * time.Millisecond

// minIntroduction is for how long at least a majority waits for servers that have never said
// who they are to do so.
const minIntroduction = 20 * time.Millisecond

// soon returns d, or what is left of the wait if that is less.
func (h *redHold) soon(d time.Duration) time.Duration {
	if h.deadline.IsZero() {
		return d
	}
	return min(d, time.Until(h.deadline))
}

// twins returns an error if two members are known to be on one server.
func (r *Red) twins() error {
	id := func(l *locking.Lock) string {
		if l == nil {
			return ""
		}
		return l.Session().KnownServer().ID
	}
	for i, l := range r.known {
		server := id(l)
		if server != "" && slices.ContainsFunc(r.known[:i], func(other *locking.Lock) bool { return id(other) == server }) {
			return fmt.Errorf("%w: red lock %q: server %d is one of those before it", lock.ErrInvalid, r.is.Name, i+1)
		}
	}
	return nil
}

// newRound begins a round.
func (h *redHold) newRound() int {
	h.votes.Lock()
	defer h.votes.Unlock()
	h.round++
	for i := range h.members {
		h.members[i] = redMember{asking: true}
	}
	return h.round
}

// count returns how many members are held, how many somebody else has, and of how many
// nothing is known yet.
func (h *redHold) count() (yes, taken, open int) {
	h.votes.Lock()
	defer h.votes.Unlock()
	for _, m := range h.members {
		switch {
		case m.part != nil:
			yes++
		case m.asking:
			open++
		case isTaken(m.err):
			taken++
		}
	}
	return yes, taken, open
}

// isTaken reports whether a member has answered that somebody else has it.
func isTaken(err error) bool {
	return errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, lock.ErrIndeterminate)
}

// ask makes an attempt for one member in the background. What it gets is given back
// unless the round is still the current one.
func (h *redHold) ask(ctx context.Context, i, round int, lease time.Duration) {
	b := h.ballot // of this hold now
	asked := h.r.s.Go(func(context.Context) {
		// Who asks may leave: what comes of it is given back then. And the hold of a member
		// may outlive its context, which nobody looks at.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.r.serverTimeout(h.ttl))
		defer cancel()
		// Before it has a vote: twins have only one. If that is refused nobody knows.
		if l := h.r.known[i]; l != nil && !l.Session().AskedServer() {
			_, _ = l.Session().Server(ctx)
			b.tell()
		}
		hold, err := h.r.members[i].TryLock(ctx, lock.Lease(lease))
		b.answered(ctx, i, round, hold, err)
	})
	if !asked {
		b.answered(ctx, i, round, nil, lock.ErrClosed)
	}
}

// answered notes what an attempt for a member has brought.
func (b *ballot) answered(ctx context.Context, i, round int, hold lock.Hold, err error) {
	b.votes.Lock()
	if round != b.round {
		b.votes.Unlock()
		if err == nil {
			unlock := func(ctx context.Context) { _ = hold.Unlock(ctx) }
			if !b.r.inBackground(i, unlock) {
				unlock(ctx) // the client is being closed, and waits for this
			}
		}
		return
	}
	m := &b.members[i]
	m.asking, m.err = false, err
	if err == nil {
		m.part = &redPart{hold}
	}
	b.votes.Unlock()
	b.tell()
}

// tell tells poll that something has changed.
func (b *ballot) tell() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// strangers reports whether servers are being asked that have never said who they are: one
// may be the twin of another.
func (h *redHold) strangers() bool {
	h.votes.Lock()
	defer h.votes.Unlock()
	for i, m := range h.members {
		if l := h.r.known[i]; l != nil && m.asking && !l.Session().AskedServer() {
			return true
		}
	}
	return false
}

// inBackground runs f, which is about a member, as a task of the client of that member: the
// one of the red lock may be closed before f ends. It reports whether it does: not on a
// client that is closed.
func (r *Red) inBackground(i int, f func(ctx context.Context)) bool {
	s := r.s
	if l := r.known[i]; l != nil {
		s = l.Session()
	}
	return s.Go(f)
}

// giveUp gives back what a round has got, waiting for that no longer than for the round,
// and returns why it is not worth trying again, if it is not.
func (h *redHold) giveUp(decided bool) error {
	members := h.take()
	freed := h.unlockEach(context.Background(), members)
	patience, cancel := context.WithTimeout(context.Background(), h.r.serverTimeout(h.ttl))
	defer cancel()
	for range freed.n {
		select {
		case <-freed.each:
			continue
		case <-patience.Done():
		}
		break
	}
	if h.split++; freed.n == 0 {
		h.split = 0
	} else {
		h.again = time.Now().Add(splitBackoff(h.split))
	}
	return h.verdict(members, decided)
}

// take returns what there is of the members and makes the hold forget it: who answers
// now is too late.
func (h *redHold) take() []redMember {
	h.votes.Lock()
	defer h.votes.Unlock()
	h.round++
	members := slices.Clone(h.members)
	for i := range h.members {
		h.members[i].part = nil
	}
	return members
}

// verdict says what the members' errors mean for the wait: nothing if others are in the
// way. Who had no time to answer because the round was decided is not away.
func (h *redHold) verdict(members []redMember, decided bool) error {
	var errs []error
	final, away := 0, 0
	for i, m := range members {
		err := m.err
		if m.asking && !decided {
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
	enough := func(n int) bool { return len(members)-n >= h.r.quorum }
	switch err := errors.Join(errs...); {
	case !enough(final):
		return err
	case !enough(away):
		return &queue.Unavailable{Err: fmt.Errorf("%w: red lock %q: %w", lock.ErrNotAcquired, h.r.is.Name, err)}
	}
	return nil
}

// isFinal reports whether an error will be the same next time.
func isFinal(err error) bool {
	for _, target := range []error{lock.ErrInvalid, lock.ErrReentered, lock.ErrUpgrade, lock.ErrClosed, lock.ErrUnsupported} {
		if errors.Is(err, target) {
			return true
		}
	}
	return refused(err)
}

// begin makes a hold of an attempt that has succeeded.
func (h *redHold) begin(ctx context.Context, o lock.Options) error {
	h.life.begin(ctx)
	if h.relay != nil && o.MaxHold > 0 {
		o.MaxHold += time.Since(h.sent) // it counts from when it was passed on
	}
	terms := watchdog.Terms{Sent: h.sent, TTL: h.ttl - drift(h.ttl), MaxHold: o.MaxHold}
	if o.Lease == 0 {
		terms.Renewer = redRenewer{}
	}
	h.lease.Key = h.r.queue
	watched := h.r.s.Dog.Watch(&h.lease, h, terms)
	if h.relay.Gone() {
		h.Lost(lock.ReasonGone, nil)
		h.lease.Forget() // it may have been lost before it was watched
	}
	switch {
	case !watched || h.r.s.Err() != nil:
		return errors.Join(lock.ErrClosed, exceptLost(h.unlock(ctx)))
	case ctx.Err() != nil:
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx), exceptLost(h.unlock(ctx)))
	case time.Since(h.sent) >= terms.TTL:
		return errors.Join(lock.ErrNotAcquired, exceptLost(h.unlock(ctx)))
	}
	return nil
}

func (h *redHold) alive() *life { return &h.life }

// Lost implements watchdog.Holder.
func (h *redHold) Lost(reason lock.Reason, cause error) {
	if !h.lose(reason, cause) {
		return
	}
	h.lease.Forget()
	if reason == lock.ReasonMaxHold || reason == lock.ReasonClosed {
		// The work under it may not have noticed yet: what is held is left to its lease, or
		// to Unlock.
		h.lateIsOver()
	} else {
		h.r.s.Go(func(context.Context) { h.giveBack(context.Background()) }) // the watchdog does not wait
	}
	h.r.s.Queues.Released(h.key(), h, queue.Release{Told: -1})
}

// lateIsOver has members given back that are got from now on.
func (h *redHold) lateIsOver() {
	h.votes.Lock()
	defer h.votes.Unlock()
	h.round++
}

// giveBack gives back what there may be of a hold that is lost, in the background. Those
// who have passed the members on before have their answers first.
func (h *redHold) giveBack(ctx context.Context) {
	if h.relay == nil {
		h.unlockEach(ctx, h.take())
		return
	}
	h.lateIsOver()
	free := func(context.Context) {
		_ = h.relay.Finish(func() error {
			_, err := h.free(ctx)
			return err
		})
	}
	if !h.r.s.Go(free) {
		free(ctx) // members may be of clients that are open
	}
}

// RenewalFailed implements watchdog.Holder.
func (h *redHold) RenewalFailed(err error, left time.Duration) { h.span.RenewalFailed(err, left) }

func (h *redHold) key() queue.Key { return queue.Key{Kind: h.r.is.Kind, Name: h.r.queue} }

func (h *redHold) remaining() time.Duration { return h.lease.Remaining() }

// freeing is members on the way to be free.
type freeing struct {
	n    int
	each chan freed // one for each, with room for all
}

// freed is what became of one.
type freed struct {
	err  error
	told int
}

// unlockEach gives back the members that are held, in the background. What is of a client
// that is being closed is given back before it returns.
func (h *redHold) unlockEach(ctx context.Context, members []redMember) freeing {
	f := freeing{each: make(chan freed, len(members))}
	for i, m := range members {
		if m.part == nil {
			continue
		}
		f.n++
		unlock := func(context.Context) {
			err := m.part.Unlock(ctx)
			f.each <- freed{err, locking.Told(m.part.Hold)}
		}
		if !h.r.inBackground(i, unlock) {
			defer unlock(ctx)
		}
	}
	return f
}

func (h *redHold) unlock(ctx context.Context) error {
	h.lease.Check()
	if err := h.end(); err != nil {
		if errors.Is(err, lock.ErrLost) {
			h.giveBack(context.WithoutCancel(ctx))
		}
		return err
	}
	h.lease.Forget()
	ctx, done := h.span.StartRelease(ctx)
	return h.released(h.pass(context.WithoutCancel(ctx)), done)
}

// pass passes the members on to the next waiter of this process if that one can have them
// as they are (see locking.Relay), or gives them back.
func (h *redHold) pass(ctx context.Context) error {
	queues, key := h.r.s.Queues, h.key()
	if h.relay != nil && queues.Next(key) == nil {
		h.relay.Await() // whoever passed them on is about to be back
	}
	for h.relaysTo(queues.Next(key)) {
		heirs := queues.Successors(key, true)
		if heirs == nil {
			return h.finish(ctx, false)
		}
		leg := h.relay.Join()
		if h.passTo(ctx, heirs) {
			return h.confirm(ctx, leg)
		}
	}
	queues.Turn(key)
	return h.finish(ctx, true)
}

// relaysTo reports whether the next waiter can have the members as they are.
func (h *redHold) relaysTo(next queue.Acquirer) bool {
	if next == nil || !h.plain() || !next.(*redHold).plain() || h.extended.Load() {
		return false
	}
	if h.relay == nil {
		h.relay = locking.NewRelay(h.sent)
	}
	_, ok := h.relay.Trusted()
	return ok
}

// plain reports whether the hold has nothing of its own but its lease, which is renewed.
func (h *redHold) plain() bool { return !h.named && !h.fixed && !h.r.shared }

// passTo makes the heir hold what is held of the members. It reports false if it has
// left.
func (h *redHold) passTo(ctx context.Context, heirs []*queue.Waiter) bool {
	heir := heirs[0].Acquirer().(*redHold)
	heir.ballot, heir.relay = h.ballot, h.relay
	heir.sent, _ = h.relay.Trusted()
	if len(h.r.s.Queues.Grant(heirs, h)) > 0 {
		return false
	}
	h.span.HandOff(ctx)
	return true
}

// confirm asks the members whether they were held when they were passed on. If there was
// no majority, whoever has them now has lost them too.
func (h *redHold) confirm(ctx context.Context, leg *locking.Leg) error {
	err := h.relay.Confirm(leg, func() error {
		err := locking.Insist(h.r.s, func() error {
			return extendMajorities(ctx, []*redHold{h}, h.ttl, true, true)[0]
		}, func(err error) bool { return errors.Is(err, lock.ErrLost) || h.fewAway(err) })
		if err != nil && !errors.Is(err, lock.ErrLost) {
			err = fmt.Errorf("redlatch: unlock %q: %w", h.r.is.Name, err)
		}
		return err
	})
	if h.fewAway(err) {
		return nil
	}
	if errors.Is(err, lock.ErrLost) {
		for _, a := range h.r.s.Queues.Holders(h.key()) {
			if other := a.(*redHold); other.ballot == h.ballot {
				other.Lost(lock.ReasonGone, nil)
			}
		}
	}
	return err
}

// fewAway reports whether no majority has confirmed the hold only because servers are away
// that are no majority themselves: Unlock does not wait for those, and nothing says that the
// lock was lost. It is not passed on without an answer for that.
func (h *redHold) fewAway(err error) bool {
	unconfirmed := (*unconfirmedError)(nil)
	return h.r.s.Err() == nil && errors.As(err, &unconfirmed) && unconfirmed.away <= len(h.members)-h.r.quorum
}

// finish gives the members back.
func (h *redHold) finish(ctx context.Context, turn bool) (err error) {
	how := queue.Release{Turn: turn}
	err = h.relay.Finish(func() (err error) {
		how.Told, err = h.free(ctx)
		return err
	})
	h.r.s.Queues.Released(h.key(), h, how)
	return err
}

// grace is for how long servers that are a little slower than the majority are waited for
// by Unlock, so that who comes next finds all members free.
const grace = 2 * time.Millisecond

// free gives back all members and returns when a majority is free, also of some that were
// not held, and how many subscribers were told, less than 0 if that is not known of all.
func (h *redHold) free(ctx context.Context) (told int, err error) {
	if h.relay != nil {
		h.awaitLate()
	}
	f := h.unlockEach(ctx, h.take())
	var (
		errs          []error
		gone          int
		free          = len(h.members) - f.n
		waitForOthers <-chan time.Time
	)
	answers := 0
	for ; answers < f.n; answers++ {
		if free >= h.r.quorum && waitForOthers == nil {
			timer := time.NewTimer(grace)
			defer timer.Stop()
			waitForOthers = timer.C
		}
		select {
		case m := <-f.each:
			switch {
			case errors.Is(m.err, lock.ErrLost), errors.Is(m.err, lock.ErrNotHeld):
				gone++
				free++
			case m.err != nil:
				errs = append(errs, m.err)
			default:
				free++
				told = sum(told, m.told)
			}
			continue
		case <-waitForOthers:
		}
		break
	}
	if h.r.channel == "" || answers < len(h.members) || len(errs) > 0 {
		told = -1 // who listens elsewhere, or does not listen, has not been counted
	}
	switch {
	case f.n-gone < h.r.quorum:
		return told, &lock.LostError{Name: h.r.is.Name, Owner: h.owner, Reason: lock.ReasonGone, When: time.Now(), Err: errors.Join(errs...)}
	case free < h.r.quorum:
		return told, fmt.Errorf("%w: unlock %q: %w", lock.ErrIndeterminate, h.r.is.Name, errors.Join(errs...))
	}
	return told, nil
}

// awaitLate waits for a moment for servers that have yet to say whether their member is held.
// What they grant after the others have been given back splits the votes of those who come
// next. It is for holds that have been passed on: others wait, here and elsewhere, for them.
func (h *redHold) awaitLate() {
	var moment <-chan time.Time
	for {
		if _, _, open := h.count(); open == 0 {
			return
		}
		if moment == nil {
			timer := time.NewTimer(grace)
			defer timer.Stop()
			moment = timer.C
		}
		select {
		case <-h.changed:
		case <-moment:
			return
		}
	}
}

// sum adds numbers of which less than 0 is not known.
func sum(a, b int) int {
	if a < 0 || b < 0 {
		return -1
	}
	return a + b
}

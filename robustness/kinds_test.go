package robustness

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
	"github.com/redlatch/redlatch/semaphore"
)

// permits is the number of permits of each semaphore.
const permits = 3

// lockKind is what two goroutines of each worker contend for: the names of the locks that a hold
// is on, the constructor, how many of 100 acquisitions name an owner, and what is special about
// the holds.
type lockKind struct {
	name  string
	locks []string // nil: one of the name of the kind
	of    func(c *redlatch.Client, seed uint64) lock.Locker
	named int

	shared  bool // others may hold the same lock in the same way
	limit   int  // as many others; 0: any number
	forever bool // without a lease, so that even the end of the process does not end it
	long    int  // of 100, how many last through renewals; 0: one
	common  bool // all acquisitions of a worker at a time are by one owner
	slow    bool // the holds last longer than most waits of a busy machine
	detach  bool // the holds are detached and adopted
	quick   bool // the holds are short and the leases long, so that only messages wake waiters in time
}

var kinds = []lockKind{
	{name: "plain", of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return c.Lock(lockName(seed, "plain"), rlock.NonReentrant())
	}},
	{name: "reentrant", named: 75, of: reentrant},
	{name: "fenced", named: 25, of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return c.FencedLock(lockName(seed, "fenced"))
	}},
	{name: "fair", named: 25, of: fair},
	{name: "election", of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return candidates{c.Election(lockName(seed, "election"))}
	}},
	{name: "write", named: 25, locks: []string{"rw"}, of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return c.RWLock(lockName(seed, "rw")).Write()
	}},
	{name: "read", named: 25, locks: []string{"rw"}, shared: true, of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return c.RWLock(lockName(seed, "rw")).Read()
	}},
	{name: "multi", long: 10, locks: []string{"reentrant", "multi", "fair"}, of: multi},
	{name: "permits", shared: true, limit: permits, of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return permitLocker{c.PermitSemaphore(lockName(seed, "permits"))}
	}},
	{name: "owner", long: 10, named: 100, common: true, locks: []string{"owned"}, of: owned},
	{name: "owner-multi", long: 10, named: 100, common: true, locks: []string{"owned", "owned2", "owned3"}, of: ownedMulti},
	{name: "queue", quick: true, of: func(c *redlatch.Client, seed uint64) lock.Locker { return c.FairLock(lockName(seed, "queue")) }},
	{name: "turns", slow: true, limit: 1, of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return permitLocker{c.PermitSemaphore(lockName(seed, "turns"))}
	}},
	{name: "left", detach: true, of: func(c *redlatch.Client, seed uint64) lock.Locker { return c.Lock(lockName(seed, "left")) }},
	{name: "counting", shared: true, limit: permits, forever: true, of: func(c *redlatch.Client, seed uint64) lock.Locker {
		return countLocker{c.Semaphore(lockName(seed, "counting"))}
	}},
}

// focuses are kinds for which some rounds are, because they need many operations in a short time.
var focuses = [][]string{{"queue"}, {"queue", "fair", "multi"}, {"turns"}, {"owner", "owner-multi"}, {"left"}}

// focusOf returns the only kinds of the round with that seed, or nil if it has all kinds.
func focusOf(seed uint64) []string {
	rng := rand.New(rand.NewPCG(seed, math.MaxUint64))
	if rng.IntN(2) == 0 {
		return nil
	}
	return focuses[rng.IntN(len(focuses))]
}

func reentrant(c *redlatch.Client, seed uint64) lock.Locker {
	return c.Lock(lockName(seed, "reentrant"))
}
func multi(c *redlatch.Client, seed uint64) lock.Locker {
	return c.MultiLock(reentrant(c, seed), c.Lock(lockName(seed, "multi")), fair(c, seed))
}

func owned(c *redlatch.Client, seed uint64) lock.Locker { return c.Lock(lockName(seed, "owned")) }

func ownedMulti(c *redlatch.Client, seed uint64) lock.Locker {
	return c.MultiLock(owned(c, seed), c.FencedLock(lockName(seed, "owned2")), c.FairLock(lockName(seed, "owned3")))
}

func fair(c *redlatch.Client, seed uint64) lock.Locker { return c.FairLock(lockName(seed, "fair")) }

// kindOf returns the kind of that name, or an exclusive one.
func kindOf(name string) lockKind {
	if i := slices.IndexFunc(kinds, func(k lockKind) bool { return k.name == name }); i >= 0 {
		return kinds[i]
	}
	return lockKind{name: name}
}

// Each round also has latches, which another two goroutines of each worker use.
const (
	latches    = 6
	latchCount = 8 // at the beginning; far workers make few calls in a round, and some latches have to reach zero
)

func latchName(seed uint64, i int) string { return lockName(seed, fmt.Sprintf("latch%d", i)) }

// lockName is the name of the lock of a kind in the round with that seed.
func lockName(seed uint64, kind string) string { return fmt.Sprintf("%s-%d", kind, seed) }

// locksOf returns the names of the locks that a hold of the i-th kind is on.
func locksOf(seed uint64, i int) (names []string) {
	if kinds[i].locks == nil {
		return []string{lockName(seed, kinds[i].name)}
	}
	for _, name := range kinds[i].locks {
		names = append(names, lockName(seed, name))
	}
	return names
}

// deletable are the locks that the nemesis deletes. The holders of a semaphore that is created
// again would add their permits to it.
var deletable = []string{"plain", "reentrant", "fenced", "fair", "election", "rw", "multi", "owned", "owned2", "owned3", "queue", "left"}

// channels returns the channels of a round on which clients wait for messages.
func channels(seed uint64) (names []string) {
	for i := range latches {
		names = append(names, wire.LatchChannel(latchName(seed, i)))
	}
	for _, name := range []string{"plain", "reentrant", "fenced", "multi", "owned", "owned2", "left"} {
		names = append(names, wire.LockChannel(lockName(seed, name)))
	}
	names = append(names, wire.RWChannel(lockName(seed, "rw")), wire.ElectionChannel(lockName(seed, "election")))
	for _, name := range []string{"permits", "counting", "turns"} {
		names = append(names, wire.SemaphoreChannel(lockName(seed, name)))
	}
	return names
}

// candidates is an election. A hold is a term.
type candidates struct{ *election.Election }

type termHold struct {
	*election.Term
	name string
}

func (h termHold) Name() string                     { return h.name }
func (h termHold) Unlock(ctx context.Context) error { return h.Resign(ctx) }
func (termHold) Detach(context.Context, time.Duration) (string, error) {
	panic("not used")
}

func (c candidates) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	term, err := c.Campaign(ctx, "value", opts...)
	return termHold{term, c.Name()}, err
}

func (c candidates) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return c.Lock(ctx, append(harness.Options(opts), lock.Wait(0))...)
}

func (candidates) Do(context.Context, func(context.Context) error, ...lock.Option) error {
	panic("not used")
}

// permitLocker is a semaphore of leased permits. A hold is one of them.
type permitLocker struct{ *semaphore.PermitSemaphore }

type permitHold struct{ *semaphore.Permit }

func (h permitHold) Unlock(ctx context.Context) error { return h.Release(ctx) }
func (permitHold) Owner() lock.Owner                  { return lock.Owner{} }
func (permitHold) Token() int64                       { return 0 }

func (l permitLocker) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	p, err := l.Acquire(ctx, 1, opts...)
	return permitHold{p}, err
}

func (l permitLocker) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	p, err := l.TryAcquire(ctx, 1, opts...)
	return permitHold{p}, err
}

func (permitLocker) Do(context.Context, func(context.Context) error, ...lock.Option) error {
	panic("not used")
}

// oversize requests more permits than there are. Such a request fails at once.
func (p *player) oversize(seed uint64) {
	called := clock()
	s := p.client.PermitSemaphore(lockName(seed, "permits"))
	all, err := s.Acquire(context.Background(), permits+1, lock.Wait(2*time.Second))
	e := event{What: oversized, At: called, Until: clock(), Outcome: fine, Err: fmt.Sprint(err)}
	switch {
	case err == nil:
		e.Outcome = wrong
		_ = all.Release(context.Background())
	case errors.Is(err, lock.ErrInvalid):
	case outcomeOfLock(err) == refused:
		e.Outcome = refused
	default:
		e.Outcome = failed
	}
	p.journal.write(e)
}

// countLocker is a semaphore without leases. A hold is a permit, and never ends by itself.
type countLocker struct{ *semaphore.Semaphore }

type countHold struct {
	lock.Hold // nil: the rest is not used
	s         *semaphore.Semaphore
}

func (h countHold) Unlock(ctx context.Context) error          { return h.s.Release(ctx, 1) }
func (countHold) Context() context.Context                    { return context.Background() }
func (countHold) Token() int64                                { return 0 }
func (countHold) Remaining() time.Duration                    { return math.MaxInt64 / 4 } // a century
func (countHold) Extend(context.Context, time.Duration) error { return nil }
func (l countLocker) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	return countHold{s: l.Semaphore}, l.Acquire(ctx, 1, lock.Wait(o.Wait))
}

func (l countLocker) TryLock(ctx context.Context, _ ...lock.HoldOption) (lock.Hold, error) {
	return countHold{s: l.Semaphore}, l.TryAcquire(ctx, 1)
}

func (countLocker) Do(context.Context, func(context.Context) error, ...lock.Option) error {
	panic("not used")
}

// create makes the semaphores of a round, and its latches if they are wanted. It repeats that
// until the server works.
func create(ctx context.Context, addr string, seed uint64, withLatches bool) error {
	try := func() error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		c, err := connect(ctx, addr)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.PermitSemaphore(lockName(seed, "permits")).TrySetPermits(ctx, permits); err != nil {
			return err
		}
		if _, err := c.PermitSemaphore(lockName(seed, "turns")).TrySetPermits(ctx, 1); err != nil {
			return err
		}
		if _, err := c.Semaphore(lockName(seed, "counting")).TrySetPermits(ctx, permits); err != nil {
			return err
		}
		for i := range latches {
			if !withLatches {
				break
			}
			if _, err := c.CountDownLatch(latchName(seed, i)).TrySetCount(ctx, latchCount); err != nil {
				return err
			}
		}
		return nil
	}
	err := try()
	for deadline := time.Now().Add(30 * time.Second); err != nil && time.Now().Before(deadline); err = try() {
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

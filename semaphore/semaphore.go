// Package semaphore limits how much of something is in use at once, over processes
// and machines: it has the semaphore and the permit-expirable semaphore of Redisson.
// Java services on the same server share the same permits.
//
// Objects are made by a client:
//
//	p, err := client.PermitSemaphore("encoders").Acquire(ctx)
//	if err != nil {
//		return err
//	}
//	defer p.Release(ctx)
//
// # Which of the two
//
// [Expirable] is the one to use unless you need the other. Each of its permits has an
// identity and a lease, so that those of a process that dies come back, and a holder
// who has lost one is told.
//
// [Semaphore] is a number and nothing else, and the cheaper for it. Anybody may give
// permits back, whoever took them. Those of a process that dies are gone until
// somebody puts them back (AddPermits).
//
// # Who is served when
//
// Waiters of one process are served first come, first served, and one that wants many
// permits keeps those behind it waiting until it has them, or it would starve. Between
// processes permits go to whoever asks first, but not past a request that has waited
// for 100 ms: then no younger request of any client of redlatch is served before it.
// So if nobody keeps permits for longer than H, a request that w older ones wait
// before has its permits after (w+1)·(H+d) and 100 ms at the latest, where d is what
// it takes to hear of a release: a round trip or two, or, when messages are lost, a
// third of the place time (3 s, or a third of the watchdog timeout if that is less).
// If a process dies while its request is the oldest, that adds the place time once.
// Java clients do not know of that order and may be served before.
//
// It follows that a request for more permits than there ever will be keeps all others
// waiting until it gives up. Bound such waits with lock.Wait, or by the context.
//
// # Once
//
// Every request has a number by which the server knows it again for a minute. A
// request whose reply is lost is sent again, or called off, and still takes effect
// once or not at all. Where even that fails because the server cannot be reached, the
// error matches lock.ErrIndeterminate, and the background goes on trying, for 45 s.
package semaphore

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// The kinds, in logs and telemetry.
const (
	kindSemaphore = "semaphore"
	kindExpirable = "permit-semaphore"
)

// Semaphore is a number of permits that clients take from and give back to. It is
// made by Client.Semaphore, immutable, and may be used concurrently. All its methods
// return an error that matches lock.ErrInvalid for a bad name or number, and
// lock.ErrClosed once the client is closed.
//
// On the server it has to be made, by TrySetPermits, AddPermits or a Release: until then
// it has no permits.
type Semaphore struct{ pool }

// New returns the semaphore of that name. It is called by the client.
func New(s *session.Session, name string) *Semaphore {
	return &Semaphore{newPool(s, kindSemaphore, name, scripts{acquireScript, undoScript, releaseScript})}
}

// Name returns the name the semaphore was asked for with.
func (s *Semaphore) Name() string { return s.name }

// TrySetPermits makes the semaphore with so many permits and reports whether it did:
// one that is there already is left as it is. It blocks for one round trip, or for up
// to 5 s if the server does not answer; the error then matches lock.ErrIndeterminate.
func (s *Semaphore) TrySetPermits(ctx context.Context, permits int) (bool, error) {
	return s.set(ctx, permits, 0)
}

// TrySetPermitsFor is TrySetPermits for a semaphore that is gone after ttl, with all
// its permits, whoever has them.
func (s *Semaphore) TrySetPermitsFor(ctx context.Context, permits int, ttl time.Duration) (bool, error) {
	if err := lock.CheckLease(ttl); err != nil {
		return false, err
	}
	return s.set(ctx, permits, ttl)
}

// AddPermits changes how many permits there are, by a number that may be negative:
// those that are free may become fewer than none, until enough are given back. The
// semaphore keeps its time to live. It blocks as TrySetPermits does.
func (s *Semaphore) AddPermits(ctx context.Context, delta int) error {
	return s.add(ctx, delta, "total")
}

// Drain takes all permits that are free and returns how many that were; if fewer than
// none were free, it returns that number and leaves none. The semaphore keeps its time
// to live. It blocks as TrySetPermits does.
func (s *Semaphore) Drain(ctx context.Context) (int, error) {
	n, err := s.change(ctx, "drain", 0, drainScript)
	return int(n), err
}

// Available returns how many permits are free, less than 0 if AddPermits has taken
// more than there were. It blocks for one round trip.
func (s *Semaphore) Available(ctx context.Context) (int, error) {
	if err := s.check(ctx); err != nil {
		return 0, err
	}
	n, err := wire.Read(ctx, s.s.Client, "GET", s.key).AsInt64()
	if err != nil && !rueidis.IsRedisNil(err) {
		return 0, fmt.Errorf("redlatch: look at %q: %w", s.name, err)
	}
	return int(n), nil
}

// Acquire takes permits, all of them at once, waiting until they are free, ctx ends,
// or lock.Wait runs out; it is the only option. It returns nil at once, and asks
// nobody, for none. Its errors are those of lock.Locker.Lock: after any of them it has
// taken none, or gives them back in the background.
//
// The permits have to be given back with Release, once, by whoever. The end of the
// context does not do it.
func (s *Semaphore) Acquire(ctx context.Context, permits int, opts ...lock.Option) error {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return err
	}
	if o.Lease != 0 || o.MaxHold != 0 {
		return fmt.Errorf("%w: permits of a Semaphore have no lease; those of an Expirable do", lock.ErrInvalid)
	}
	return s.take(ctx, permits, o, o.Bounded && o.Wait == 0)
}

// TryAcquire makes one attempt to take permits, which blocks for one round trip. If
// too few are free, or somebody else has waited for them for long, the error matches
// lock.ErrNotAcquired; otherwise it is as Acquire.
func (s *Semaphore) TryAcquire(ctx context.Context, permits int) error {
	return s.take(ctx, permits, lock.Options{}, true)
}

func (s *Semaphore) take(ctx context.Context, permits int, o lock.Options, once bool) error {
	if err := s.check(ctx); err != nil {
		return err
	}
	if err := checkPermits(permits); err != nil || permits == 0 {
		return err
	}
	if !s.s.Enter() {
		return lock.ErrClosed
	}
	defer s.s.Leave()
	_, err := s.acquire(ctx, grant{permits: permits}, o, once)
	return err
}

// Release gives permits back, whoever took them, and makes the semaphore if it is not
// there. It always tries, also when ctx has ended already, and blocks until the server
// has answered, for some 5 s at most. It returns an error that matches
// lock.ErrInvalid, and changes nothing, if there would be more than MaxPermits, and
// one that matches lock.ErrIndeterminate if the server never answered: then the
// release is tried further in the background, and must not be repeated. It does
// nothing for no permits.
func (s *Semaphore) Release(ctx context.Context, permits int) error {
	_, err := s.put(ctx, permits, false)
	return err
}

// ReleaseIfExists is Release for a semaphore that may have been deleted, or expired:
// if it is not there it changes nothing and returns false.
func (s *Semaphore) ReleaseIfExists(ctx context.Context, permits int) (bool, error) {
	return s.put(ctx, permits, true)
}

func (s *Semaphore) put(ctx context.Context, permits int, ifExists bool) (bool, error) {
	if err := s.check(ctx); err != nil {
		return false, err
	}
	if err := checkPermits(permits); err != nil || permits == 0 {
		return false, err
	}
	if !s.s.Enter() { // or Close might not let it give back
		return false, lock.ErrClosed
	}
	defer s.s.Leave()
	result, err := s.release(context.WithoutCancel(ctx), patience, grant{permits: permits}, ifExists)
	switch {
	case err != nil:
		return false, fmt.Errorf("redlatch: release permits of %q: %w", s.name, err)
	case result == releaseTooMany:
		return false, fmt.Errorf("%w: release of %d permits: %q would have more than %d", lock.ErrInvalid, permits, s.name, MaxPermits)
	}
	return result == releaseDone, nil
}

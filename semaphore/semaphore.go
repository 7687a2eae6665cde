// Package semaphore limits the concurrent use of a resource across processes and
// machines. It contains Redisson's semaphore and permit-expirable semaphore. Java services
// on the same server share the same permits.
//
// A client creates the objects. The first request creates the semaphore on the server, with the
// number of permits in [Permits]:
//
//	encoders := client.PermitSemaphore("encoders", semaphore.Permits(8))
//	err := encoders.Do(ctx, func(ctx context.Context) error {
//		return encode(ctx, video) // ctx ends if the permit is lost
//	})
//
// Without that option a semaphore does not exist until its number of permits is set, and then
// TryAcquire returns [ErrNotFound] and Acquire waits.
//
// # Which one to use
//
// Prefer [PermitSemaphore]. Each of its permits has an id and a lease, so the permits of a
// process that dies become free again, and a holder learns when it has lost a permit.
//
// [Semaphore] is only a number, and cheaper. Any client may release permits, no matter
// which client acquired them. The permits of a process that dies stay acquired until
// AddPermits replaces them.
//
// # Fairness
//
// Waiters of one process are served first come, first served. A request for many permits
// blocks the requests behind it until it is served; otherwise it would starve. Between
// processes the first request to arrive gets the permits, but no redlatch client overtakes a
// request that has waited for 100 ms or more.
//
// So if no permit is held for longer than H, a request with w older requests before it is
// served after (w+1)·(H+d) + 100 ms at the latest. Here d is the time it takes to learn of
// a release: a round trip or two or, if messages are lost, a third of the heartbeat timeout
// (3 s, or a third of the watchdog timeout if that is shorter). A process that dies while
// its request is the oldest adds one heartbeat timeout. Java clients do not know this order
// and may be served earlier.
//
// A request for more permits than a [PermitSemaphore] has in total fails with an error that matches
// lock.ErrInvalid: at once or, if the total shrinks while it waits, at its next heartbeat.
// While there is no permit at all, requests of any size wait. The total of a [Semaphore] is
// unknown, because any client may release permits that nobody has acquired. So a request for
// more than there will ever be waits, and blocks all others, until it gives up. Bound such
// waits with lock.Wait or the context.
//
// # Retries
//
// A request without a reply is retried or undone for up to 5 minutes, and takes effect at
// most once. The protocol follows NFSv4.1's sessions (RFC 8881, section 2.10.6): a request
// has a slot of its client and a sequence number, and the server keeps the last number of
// each slot with the reply. Here a reply is kept for 6 minutes or more. Therefore a request also has
// an earlier time, by the server's clock, after which the server rejects it, so no retry is
// mistaken for a new request, however long its process or its server was stopped.
//
// The outcome is unknown if the server stays unreachable or rejects a retry: the error matches
// lock.ErrIndeterminate. An acquisition that could not be undone in time has acquired its
// permits like one of a process that has died. An undo does not apply to a Semaphore that was
// deleted and created again, unless Redisson has done both.
package semaphore

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// The names of the kinds in logs and telemetry.
const (
	kindSemaphore       = "semaphore"
	kindPermitSemaphore = "permit-semaphore"
)

// Semaphore is a number of permits that clients acquire and release. Client.Semaphore
// returns one. It is immutable and safe for concurrent use. All its methods return an error
// that matches lock.ErrInvalid for an invalid name or number, and lock.ErrClosed after the
// client is closed.
//
// With [Permits] the first request creates the semaphore on the server. Otherwise TrySetPermits,
// SetPermits, AddPermits or Release does, and until then it has no permits.
type Semaphore struct{ pool }

// New returns the semaphore of that name. Client.Semaphore calls it.
func New(all *Shared, name string, opts ...Option) *Semaphore {
	return &Semaphore{newPool(all, kindSemaphore, name, scripts{acquireScript, undoScript, releaseScript}, opts)}
}

// TrySetPermitsFor is TrySetPermits for a semaphore that is deleted after ttl, with all its
// permits, free or acquired. With the option IdleTTL the error matches lock.ErrInvalid.
func (s *Semaphore) TrySetPermitsFor(ctx context.Context, permits int, ttl time.Duration) (bool, error) {
	if s.idle != "" {
		return false, s.object().Refused(setPermits,
			fmt.Errorf("%w: TrySetPermitsFor: each use replaces ttl by its semaphore.IdleTTL", lock.ErrInvalid))
	}
	if err := session.CheckLease(ttl); err != nil {
		return false, s.object().Refused(setPermits, err)
	}
	return s.set(ctx, permits, wire.Millis(ttl))
}

// SetPermits sets the number of free permits, no matter how many are acquired: if those are
// released later, their number comes on top. To change the size of a semaphore in use call
// AddPermits. The semaphore keeps its time to live. SetPermits blocks as TrySetPermits does.
func (s *Semaphore) SetPermits(ctx context.Context, permits int) error {
	return s.resize(ctx, permits)
}

// Drain acquires all free permits and returns their number. A negative number of free
// permits is returned as such and reset to 0. The semaphore keeps its time to live. Drain
// blocks as TrySetPermits does.
func (s *Semaphore) Drain(ctx context.Context) (int, error) {
	n, err := s.change(ctx, "drain", 0, drainScript, strconv.Itoa(s.size))
	return int(n), err
}

// Available returns the number of free permits, which is negative if AddPermits has removed
// more than were free. It blocks for one round trip.
func (s *Semaphore) Available(ctx context.Context) (int, error) {
	n, _, err := s.free(ctx)
	return n, err
}

// Stats are the numbers of a Semaphore. The number of acquired permits, and therefore the total,
// is unknown to the server.
type Stats struct {
	// Available is the number of free permits, which may be negative: see Semaphore.Available.
	Available int
	// Waiting is the number of clients in the wait queue: those whose first request has waited
	// for 100 ms or more. A process usually has one client. Java clients are never in it.
	Waiting int
}

// Stats returns the numbers of one moment. Without a semaphore Available is 0, and so is Waiting, unless
// the semaphore was deleted by other means than Delete. Stats writes nothing and blocks for one round
// trip.
func (s *Semaphore) Stats(ctx context.Context) (Stats, error) {
	free, _, waiting, err := s.stats(ctx)
	return Stats{Available: free, Waiting: waiting}, err
}

// Acquire acquires n permits, all at once. It waits until they are free, ctx is done, or
// lock.Wait runs out. If the semaphore
// does not exist Acquire logs that, once for each name unless there are more than 1,000, and waits until it
// does. For 0 permits it returns nil and sends nothing. It has the errors of lock.Locker.Lock: after an error it has acquired no
// permits, or releases them in the background.
//
// Release must release the permits once; any client may do so. The end of ctx does not
// release them.
func (s *Semaphore) Acquire(ctx context.Context, n int, opts ...lock.WaitOption) error {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return s.object().Refused("acquire", err)
	}
	return s.take(ctx, n, o, o.Bounded && o.Wait == 0)
}

// TryAcquire makes one attempt to acquire permits, which blocks for one round trip. If too
// few are free, or an older request is in the wait queue, the error matches
// lock.ErrNotAcquired, and if the semaphore does not exist, ErrNotFound; otherwise it is like
// Acquire.
func (s *Semaphore) TryAcquire(ctx context.Context, permits int) error {
	return s.take(ctx, permits, lock.Options{}, true)
}

func (s *Semaphore) take(ctx context.Context, permits int, o lock.Options, once bool) error {
	if ok, err := s.enter(ctx, "acquire", permits, MaxPermits, s.s.Enter); !ok {
		return err
	}
	defer s.s.Leave()
	_, err := s.acquire(ctx, grant{permits: permits}, o, once)
	return err
}

// Release releases permits, no matter which client acquired them, and creates the semaphore
// if it does not exist: with just these permits or, with the option Permits, in the size given
// there. It tries even if ctx is done, and blocks until the server has
// answered, for about 5 s at most. It returns an error that matches lock.ErrInvalid, without
// any change, if the semaphore would have more than MaxPermits, and one that matches
// lock.ErrIndeterminate if the server did not answer. If the server rejects all writes for a second,
// because it is not the primary (the error then matches lock.ErrUnavailable), lacks replicas, or cannot
// store anything, Release returns what it says. In both cases the retries continue in the background, and
// the caller must not repeat the release. For 0 permits Release does nothing.
func (s *Semaphore) Release(ctx context.Context, permits int) error {
	_, err := s.put(ctx, permits, false)
	return err
}

// ReleaseIfExists is Release for a semaphore that may have been deleted or have expired. If
// it does not exist, ReleaseIfExists returns false and changes nothing.
func (s *Semaphore) ReleaseIfExists(ctx context.Context, permits int) (bool, error) {
	return s.put(ctx, permits, true)
}

func (s *Semaphore) put(ctx context.Context, permits int, ifExists bool) (bool, error) {
	if ok, err := s.enter(ctx, "release", permits, MaxPermits, s.s.Stay); !ok {
		return false, err
	}
	defer s.s.Leave() // Close waits for the release

	began := time.Now()
	ctx = context.WithoutCancel(ctx)
	result, err := s.release(ctx, patience, grant{permits: permits}, ifExists)
	if err != nil {
		return false, s.failed(ctx, "release", began, err)
	}
	if result == releaseTooMany {
		return false, s.object().Refused("release",
			fmt.Errorf("%w: %d permits: the semaphore would have more than %d", lock.ErrInvalid, permits, MaxPermits))
	}

	return result == releaseDone, nil
}

// Do acquires a permit like Acquire, runs fn under ctx, and releases the permit when fn returns,
// panics (the panic continues) or calls runtime.Goexit. It returns the error of Acquire, or that
// of fn, unchanged. If the release fails, Do returns a *lock.DoError with both. If the semaphore was
// deleted or has expired while fn ran, Do releases nothing and does not create it. If fn is nil, the
// error matches lock.ErrInvalid.
func (s *Semaphore) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.WaitOption) error {
	return engine.Do(ctx, s.object(), locker{name: s.id.Name, acquire: func() (lock.Hold, error) {
		return unit{s: s, ctx: ctx}, s.Acquire(ctx, 1, opts...)
	}}, fn)
}

// locker is what Do of a semaphore passes to lock.Do, which calls no other methods.
type locker struct {
	lock.Locker
	name    string
	acquire func() (lock.Hold, error)
}

func (l locker) Name() string { return l.name }

func (l locker) Lock(context.Context, ...lock.Option) (lock.Hold, error) { return l.acquire() }

// unit is an acquired permit of a Semaphore, for lock.Do.
type unit struct {
	lock.Hold
	s   *Semaphore
	ctx context.Context
}

func (u unit) Context() context.Context { return u.ctx }

// Unlock implements lock.Hold. The permit is gone if the semaphore is.
func (u unit) Unlock(ctx context.Context) error {
	_, err := u.s.ReleaseIfExists(ctx, 1)
	return err
}

package semaphore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// ErrNotFound means that the semaphore does not exist on the server, and that the object was
// made without [Permits]. TryAcquire returns it, and so does Acquire with lock.Wait(0). It matches
// no error of package lock, not even lock.ErrNotAcquired: no other holder is about to release a
// permit.
var ErrNotFound = errors.New("redlatch: semaphore not found")

// creation says how to create a semaphore.
const creation = "semaphore.Permits or TrySetPermits creates it"

// errMissing is a cause of the error of a wait that is over. It is not ErrNotFound, which a wait does
// not return.
var errMissing = errors.New("the semaphore did not exist; " + creation)

// Option configures a semaphore object. nil is invalid.
type Option func(*pool) error

// Permits is the option to create the semaphore with n permits, from 1 to MaxPermits, if it does
// not exist when permits are acquired, drained, added, or released. This takes no round trip of its
// own, or one if this client has just used the semaphore. So the semaphore comes back after the
// server has lost it. A release that releases nothing does
// not create it: neither ReleaseIfExists, nor Release of a permit that is not acquired. An existing
// semaphore keeps its size: see SetPermits.
//
// Permits that were acquired before the loss may still be in use then. Those of a
// PermitSemaphore are lost, and their holders learn it. Those of a Semaphore are unknown to the
// server, and a release adds them to the new ones, except for the release that creates the
// semaphore.
func Permits(n int) Option {
	return func(p *pool) error {
		if n < 1 || n > MaxPermits {
			return fmt.Errorf("semaphore.Permits(%d): must be from 1 to %d", n, MaxPermits)
		}
		p.size = n
		return nil
	}
}

// minIdleTTL exceeds the time for which requests are retried, and for which the server knows them again.
const minIdleTTL = 10 * time.Minute

// IdleTTL is the option to have the server delete the semaphore when it has not been used for d, or for up to a
// tenth longer. It is for semaphores with many names, such as one for each tenant, and goes together with
// [Permits]: the next use then creates the semaphore again. Without Permits that use finds none, as after Delete.
// d is from 10 minutes to lock.MaxLease.
//
// Each use begins the time again: an acquisition, be it successful or not, and each attempt of a caller that
// waits; a release; a change of the number of permits; and the extension, renewal, detachment or adoption of a
// permit. Reads such as Stats do not. A use takes no request of its own, and sets the lifetime only if less than d
// is left, or more than d and a tenth.
//
// Held permits of a [PermitSemaphore] stay. The semaphore lasts at least as long as the leases of its permits,
// which renewals extend, and does not expire while a permit with [Forever] is acquired. Of a [Semaphore] the
// server does not know which permits are held, so d must exceed the longest time for which a permit is held by 5
// minutes, for which a release may be retried. Otherwise a semaphore that is created again has all of its permits
// while some are still in use, and their release adds to them.
//
// The last use decides. Give all objects of a name the same IdleTTL: a use without the option leaves the lifetime
// as it is, and a permit that it acquires can expire with the semaphore. The same applies to Redisson, until the
// next use with the option, which takes all permits into account, so that those without a lease never expire.
// IdleTTL replaces every other lifetime, from TrySetPermitsFor and from Redisson, whose addPermits and
// drainPermits remove the lifetime of the number until the next use.
func IdleTTL(d time.Duration) Option {
	return func(p *pool) error {
		if d < minIdleTTL || d > lock.MaxLease {
			return fmt.Errorf("semaphore.IdleTTL(%v): must be from %v to %v", d, minIdleTTL, lock.MaxLease)
		}
		p.idle = wire.Millis(d)
		return nil
	}
}

// setPermits is the op of the calls that set the number of permits.
const setPermits = "set permits"

// TrySetPermits creates the semaphore with this number of permits and reports whether it
// did; an existing semaphore stays unchanged, and a key of another type is an error. It blocks
// for one round trip, or for up to 5 s if the server does not answer; the error then matches
// lock.ErrIndeterminate, or lock.ErrUnavailable if nothing could be sent.
func (s *pool) TrySetPermits(ctx context.Context, permits int) (bool, error) {
	return s.set(ctx, permits, "")
}

// set creates the semaphore unless it exists.
func (s *pool) set(ctx context.Context, permits int, ttl string) (bool, error) {
	reply, err := s.change(ctx, setPermits, permits, setScript, strconv.Itoa(permits), ttl)
	return reply == 1, err
}

// resize sets the total number of permits, or of free ones if the total is unknown.
func (s *pool) resize(ctx context.Context, permits int) error {
	_, err := s.change(ctx, setPermits, permits, resizeScript, strconv.Itoa(permits))
	return err
}

// AddPermits changes the number of permits by delta, which may be negative. The number of
// free permits may become negative, until enough are released. The semaphore keeps its time
// to live. AddPermits blocks as TrySetPermits does.
func (s *pool) AddPermits(ctx context.Context, delta int) error {
	if delta == 0 {
		return s.object().Refused("add permits", s.check(ctx))
	}

	payload := "total"
	if s.leased() {
		payload = "delta"
	}
	reply, err := s.change(ctx, "add permits", max(delta, -delta), addScript, strconv.Itoa(delta), payload, strconv.Itoa(s.size))
	if err == nil && reply < 0 {
		err = s.object().Refused("add permits",
			fmt.Errorf("%w: %+d permits: the result must be from -%d to %[3]d", lock.ErrInvalid, delta, MaxPermits))
	}
	return err
}

// Delete deletes the semaphore with all of its permits, free and acquired, and reports whether
// there was one. Callers that wait go on waiting, and the next request of an object with Permits
// creates the semaphore again. Delete does not notify holders: the holders of a PermitSemaphore learn
// of their loss with the next renewal, and a Release of a Semaphore creates it again, so use
// ReleaseIfExists. Delete blocks as TrySetPermits does.
//
// A Semaphore that was created again does not know which permits belong to the one before: Release
// and ReleaseIfExists of those add to its permits. For up to 5 minutes after Delete, so do the repeat of
// a release without a reply, and the return of permits whose caller gave up while the server acquired
// them. The undo of an acquisition without a reply does not.
func (s *pool) Delete(ctx context.Context) (bool, error) {
	reply, err := s.change(ctx, "delete", 0, deleteScript)
	return reply == 1, err
}

// Exists reports whether the semaphore exists on the server, be its permits free or not. It writes
// nothing and blocks for one round trip.
func (s *pool) Exists(ctx context.Context) (bool, error) {
	_, exists, err := s.free(ctx)
	return exists, err
}

// free returns the number of free permits that the server has, and whether there is one. Expired
// permits do not count.
func (s *pool) free(ctx context.Context) (n int, exists bool, err error) {
	if err := s.check(ctx); err != nil {
		return 0, false, s.object().Refused("read", err)
	}

	began := time.Now()
	free, err := wire.Read(ctx, s.s.Client, "GET", s.key).AsInt64()
	if err == nil {
		return int(free), true, nil
	}
	if rueidis.IsRedisNil(err) {
		return 0, false, nil
	}
	if errors.Is(err, strconv.ErrSyntax) || errors.Is(err, strconv.ErrRange) {
		err = fmt.Errorf("%w: %w", wire.ErrWrongType, err)
	}
	return 0, false, s.object().ReadFailed(ctx, "read", began, err)
}

// stats returns the numbers of permits and of clients in the wait queue.
func (s *pool) stats(ctx context.Context) (free, taken, waiting int, err error) {
	if err := s.check(ctx); err != nil {
		return 0, 0, 0, s.object().Refused("read", err)
	}

	keys := []string{s.key, wire.SemaphoreAlive(s.key)}
	if s.leased() {
		keys = append(keys, wire.PermitTimeouts(s.key))
	}
	began := time.Now()
	n, err := wire.Numbers(statsScript.Exec(ctx, s.s.Client, keys, nil), 3, wire.Any)
	if err != nil {
		return 0, 0, 0, s.object().ReadFailed(ctx, "read", began, err)
	}

	return int(n[0]), int(n[1]), int(n[2]), nil
}

// warnMissing logs, once for each client and name while the names are few, that a caller waits for a
// semaphore that does not exist. The caller goes on waiting, because another process may create it.
func (s *pool) warnMissing() {
	if s.s.Warnings.First(s.id) {
		s.s.Logger.Warn("redlatch: Acquire waits for a semaphore that does not exist; "+creation,
			"name", text.Safe(s.id.Name), "kind", s.id.Kind)
	}
}

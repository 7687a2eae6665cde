package semaphore

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Forever is the option for a permit that is not renewed and never expires. If its process
// dies, it stays acquired until it is released by its id. This is what Redisson does
// without a lease.
func Forever() lock.HoldOption { return lock.Lease(lock.NoExpiry) }

// MaxBatch is the most permits of a PermitSemaphore that one call can acquire or release. It bounds how long a
// script blocks the server.
const MaxBatch = 10_000

// PermitSemaphore is a semaphore whose permits have an id and a lease. Client.PermitSemaphore
// returns one. It is immutable and safe for concurrent use. All its methods return an error
// that matches lock.ErrInvalid for an invalid name, number or id, and lock.ErrClosed after
// the client is closed.
//
// A permit has one of three kinds of lease. With lock.Lease it is fixed. Without an option
// the watchdog renews it until the permit is released; if the process dies, the permit
// becomes free within the watchdog timeout. With Forever it never ends. Leases are measured
// by the clock of the server; Redisson measures them by the clock of each client.
//
// With [Permits] the first request creates the semaphore on the server. Otherwise TrySetPermits,
// SetPermits or AddPermits does, and until then it has no permits.
type PermitSemaphore struct {
	pool
	permits *registry
	renewer watchdog.Renewer
}

// NewPermitSemaphore returns the permit-expirable semaphore of that name. Client.PermitSemaphore calls
// it.
func NewPermitSemaphore(all *Shared, name string, opts ...Option) *PermitSemaphore {
	p := newPool(all, kindPermitSemaphore, name, scripts{
		permitAcquireScript, permitUndoScript, permitReleaseScript,
	}, opts)
	scripts := engine.ScriptRenewer{Client: p.s.Client, Script: permitRenewScript, Permits: true}
	return &PermitSemaphore{p, &all.permits, renewer{scripts, p.idle}}
}

// SetPermits sets the total number of permits, free and acquired. If more are acquired than
// that, the number of free permits is negative until enough are released. SetPermits blocks
// as TrySetPermits does.
func (s *PermitSemaphore) SetPermits(ctx context.Context, permits int) error {
	return s.resize(ctx, permits)
}

// Acquire acquires n permits, all or none, in one Permit. It waits until they are free, ctx is done, or lock.Wait runs
// out. It has the errors of lock.Locker.Lock: after an error it has acquired no permit, or
// releases them in the background. As there, ctx bounds the wait and is the parent of the
// permit's context. n is from 1 to MaxBatch. If it exceeds the total number of permits, the error matches
// lock.ErrInvalid. If the semaphore does not exist Acquire logs that, once for each name unless there
// are more than 1,000, and waits until it does.
func (s *PermitSemaphore) Acquire(ctx context.Context, n int, opts ...lock.Option) (*Permit, error) {
	o, err := resolve(opts)
	if err != nil {
		return nil, s.object().Refused("acquire", err)
	}
	return s.take(ctx, n, o, o.Bounded && o.Wait == 0)
}

// TryAcquire makes one attempt to acquire n permits, which blocks for one round trip. If too few
// are free, or an older request is in the wait queue, the error matches lock.ErrNotAcquired, and if
// the semaphore does not exist, ErrNotFound; otherwise it is like Acquire.
func (s *PermitSemaphore) TryAcquire(ctx context.Context, n int, opts ...lock.HoldOption) (*Permit, error) {
	o, err := resolve(opts)
	if err != nil {
		return nil, s.object().Refused("acquire", err)
	}
	return s.take(ctx, n, o, true)
}

// resolve is lock.Resolve for permits.
func resolve[O lock.Option](opts []O) (lock.Options, error) {
	o, err := lock.Resolve(opts...)
	if err == nil && o.AtLeast > 0 {
		err = fmt.Errorf("%w: AtLeast: a permit has no least time", lock.ErrInvalid)
	}
	return o, err
}

// Do acquires a permit like Acquire, runs fn under the permit's context, and releases the permit
// when fn returns, panics (the panic continues) or calls runtime.Goexit. It returns the error of
// Acquire, or the error of fn, unchanged. If Release returns an error, which matches lock.ErrLost if the
// permit was lost while fn ran, Do returns a *lock.DoError with both. If fn is nil, the error
// matches lock.ErrInvalid. See lock.Locker for nested locks and permits.
func (s *PermitSemaphore) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, s.object(), locker{name: s.id.Name, acquire: func() (lock.Hold, error) {
		p, err := s.Acquire(ctx, 1, opts...)
		if err != nil {
			return nil, err
		}
		return &p.handle, nil
	}}, fn)
}

func (s *PermitSemaphore) take(ctx context.Context, n int, o lock.Options, once bool) (*Permit, error) {
	if err := cmp.Or(s.check(ctx), checkCount(n, 1, MaxBatch)); err != nil {
		return nil, s.object().Refused("acquire", err)
	}
	if !s.s.Enter() {
		return nil, s.object().Refused("acquire", lock.ErrClosed)
	}
	defer s.s.Leave()

	r, err := s.acquire(ctx, grant{permits: n, lease: s.lease(o)}, o, once)
	if err != nil {
		return nil, err
	}

	return s.newPermit(engine.HoldParent(ctx, o), r, o), nil
}

// lease returns the first lease of a permit with these options.
func (s *PermitSemaphore) lease(o lock.Options) time.Duration {
	switch o.Lease {
	case lock.NoExpiry:
		return forever
	case 0:
		return s.s.WatchdogTimeout
	default:
		return o.Lease
	}
}

// Release releases permits by their ids, no matter which process acquired them. It releases
// all of them, or none if one of them is not acquired or has expired; the error then matches
// lock.ErrNotHeld. A permit of this client ends as it does by Permit.Release, when the server
// has confirmed the release or did not answer; a Permit of several is lost if the list does not
// contain all of its ids. Release tries even if ctx is done, and blocks
// until the server has answered, for about 5 s at most. If the server did not answer, the
// error matches lock.ErrIndeterminate. If it rejects all writes for a second, Release returns what it
// says. In both cases the retries continue in the background. Without ids Release does nothing.
func (s *PermitSemaphore) Release(ctx context.Context, ids ...string) error {
	released, err := s.TryRelease(ctx, ids...)
	if err == nil && !released && len(ids) > 0 {
		return s.object().Refused("release",
			fmt.Errorf("%w: one of %d permits is not acquired or has expired", lock.ErrNotHeld, len(ids)))
	}
	return err
}

// TryRelease is Release, but returns false instead of an error if a permit is not acquired
// or has expired.
func (s *PermitSemaphore) TryRelease(ctx context.Context, ids ...string) (bool, error) {
	raw, err := s.parse(ctx, "release", ids...)
	if err != nil {
		return false, err
	}
	if ok, err := s.enter(ctx, "release", len(raw), MaxBatch, s.s.Stay); !ok {
		return false, err
	}
	defer s.s.Leave() // Close waits for the release

	local := map[*permit]int{} // with the number of their ids
	for _, id := range raw {
		if p := s.local(id); p != nil {
			if local[p]++; local[p] == 1 {
				p.releasing.Add(1)
			}
		}
	}

	began := time.Now()
	ctx = context.WithoutCancel(ctx)
	result, err := s.release(ctx, patience, grant{permits: len(raw), ids: raw}, false)
	released := err == nil && result == releaseDone || engine.GoesOn(err)
	for p, n := range local {
		all := n == len(p.raw)

		// If several were not released, another one may be missing.
		p.endRelease(released && all, released && !all || err == nil && len(raw) == 1)
	}

	if err != nil {
		return false, s.failed(ctx, "release", began, err)
	}

	return released, nil
}

// Available returns the number of free permits, including expired ones. It is negative if
// more permits are acquired than the total. It writes nothing and blocks for one round trip.
func (s *PermitSemaphore) Available(ctx context.Context) (int, error) {
	free, _, _, err := s.stats(ctx)
	return free, err
}

// PermitStats are the numbers of a PermitSemaphore.
type PermitStats struct {
	// Total is the number of permits, free and acquired.
	Total int
	// Available is the number of free permits: see PermitSemaphore.Available.
	Available int
	// Taken is the number of acquired permits that have not expired.
	Taken int
	// Waiting is the number of clients in the wait queue: see Stats.
	Waiting int
}

// Stats returns the numbers of one moment. Without a semaphore Available is 0, and so are the others,
// unless only its number of free permits was deleted by other means than Delete. Stats writes nothing
// and blocks for one round trip.
func (s *PermitSemaphore) Stats(ctx context.Context) (PermitStats, error) {
	free, taken, waiting, err := s.stats(ctx)
	return PermitStats{Total: free + taken, Available: free, Taken: taken, Waiting: waiting}, err
}

// run runs a script that does not begin with pool.lua.
func (s *PermitSemaphore) run(ctx context.Context, script *wire.Script, args ...string) rueidis.RedisResult {
	script, args = scriptFor(script, args, s.idle)
	return script.Exec(ctx, s.s.Client, []string{s.key, wire.PermitTimeouts(s.key)}, args)
}

// TTL returns the remaining lease of a permit, lock.NoExpiry if it never expires. The
// error matches lock.ErrNotHeld if the permit is not acquired or has expired. TTL
// writes nothing and blocks for one round trip.
func (s *PermitSemaphore) TTL(ctx context.Context, id string) (time.Duration, error) {
	raw, err := s.parse(ctx, "read", id)
	if err != nil {
		return 0, err
	}

	began := time.Now()
	left, err := wire.Number(s.run(ctx, permitLeftScript, raw...), wire.Times)
	if err != nil {
		return 0, s.object().ReadFailed(ctx, "read", began, err)
	}
	if left == -1 {
		return lock.NoExpiry, nil
	}
	if left < 0 {
		return 0, s.object().Refused("read", fmt.Errorf("%w: permit %s is not acquired or has expired", lock.ErrNotHeld, id))
	}
	return wire.Duration(left), nil
}

// SetTTL sets the lease of a permit, counted from now, and reports whether the
// permit is acquired. The new lease may be shorter or longer, or lock.NoExpiry. A Permit of
// this client is no longer renewed; with several ids, it ends when the first of them expires. Waiters are not notified: they retry at the previous
// expiry, on a message, or after 5 s. SetTTL blocks for one round trip. If the reply
// is lost, the permit may expire at either time, and this client assumes the earlier one.
func (s *PermitSemaphore) SetTTL(ctx context.Context, id string, lease time.Duration) (bool, error) {
	raw, err := s.parse(ctx, "change lease", id)
	if err != nil {
		return false, err
	}
	if lease == lock.NoExpiry {
		lease = forever
	} else if err := session.CheckLease(lease); err != nil {
		return false, s.object().Refused("change lease", err)
	}
	return s.changeLease(ctx, "change lease", s.local(raw[0]), raw, lease)
}

// changeLease sends a request for a lease of at least that length, or just that length unless op is
// extend, for permits of p. p is nil unless this client has them. If two such requests for it were in progress, the
// order in which the server runs them would be unknown, and its lease could be overestimated.
func (s *PermitSemaphore) changeLease(ctx context.Context, op string, p *permit, raw []string, lease time.Duration) (acquired bool, err error) {
	exactly := op != extend
	began := time.Now()
	defer func() { err = s.failed(ctx, op, began, err) }()

	if ctx.Err() != nil {
		return false, lock.ErrUnavailable
	}
	if p != nil {
		if !p.startChange(ctx) {
			return false, lock.ErrUnavailable
		}
		defer p.endChange()
	}

	sent := time.Now()
	how := "least"
	if exactly {
		how = "just"
		if p != nil && lease < p.lease.Remaining() {
			p.fix(sent, lease) // before another client can acquire it
		}
	}

	acquired, err = wire.Bool(s.run(ctx, permitExtendScript, append([]string{leaseArg(lease), how}, raw...)...))
	switch {
	case err != nil || p == nil:
	case !acquired:
		p.gone()
	case exactly:
		p.fix(sent, lease)
	default:
		p.lease.Extended(sent, lease)
	}

	return acquired, err
}

// idSize is the number of bytes of an id on the server.
const idSize = 16

// newIDs returns n new ids in the form of the server.
func newIDs(n int) []string {
	first := make([]byte, idSize)
	_, _ = rand.Read(first) // never returns an error
	return consecutive(string(first), n)
}

// consecutive returns n ids from the first one on, so that this one identifies all of them. Only the
// last 32 bits count up.
func consecutive(first string, n int) []string {
	const at = idSize - 4
	ids := make([]string, n)
	last := binary.BigEndian.Uint32([]byte(first[at:]))
	for i := range ids {
		ids[i] = string(binary.BigEndian.AppendUint32([]byte(first[:at]), last+uint32(i)))
	}
	return ids
}

// parse converts ids to the form of the server. It returns an error of the call for op if no operation
// with them can succeed.
func (s *PermitSemaphore) parse(ctx context.Context, op string, ids ...string) ([]string, error) {
	if err := cmp.Or(s.check(ctx), checkCount(len(ids), 0, MaxBatch)); err != nil {
		return nil, s.object().Refused(op, err)
	}

	raw := make([]string, len(ids))
	seen := make(map[string]bool, len(ids))
	for i, id := range ids {
		bytes, err := hex.DecodeString(id)
		raw[i] = string(bytes)
		if err != nil || len(bytes) != idSize {
			return nil, s.object().Refused(op, fmt.Errorf("%w: permit id %q: must be %d hexadecimal digits", lock.ErrInvalid, id, 2*idSize))
		}
		if seen[raw[i]] {
			return nil, s.object().Refused(op, fmt.Errorf("%w: duplicate permit %s", lock.ErrInvalid, id))
		}
		seen[raw[i]] = true
	}

	return raw, nil
}

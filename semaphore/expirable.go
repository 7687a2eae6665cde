package semaphore

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

var (
	//go:embed permits.lua
	permitsLua string
	//go:embed permit_acquire.lua
	permitAcquireLua string
	//go:embed permit_undo.lua
	permitUndoLua string
	//go:embed permit_release.lua
	permitReleaseLua string
	//go:embed permit_set.lua
	permitSetLua string
	//go:embed permit_counts.lua
	permitCountsLua string
	//go:embed permit_left.lua
	permitLeftLua string
	//go:embed permit_extend.lua
	permitExtendLua string
	//go:embed permit_renew.lua
	permitRenewLua string

	permitAcquireScript = wire.NewScript(poolLua + permitsLua + permitAcquireLua)
	permitUndoScript    = wire.NewScript(poolLua + permitsLua + permitUndoLua)
	permitReleaseScript = wire.NewScript(poolLua + permitsLua + permitReleaseLua)
	permitSetScript     = wire.NewScript(poolLua + permitsLua + permitSetLua)
	permitCountsScript  = wire.NewScript(permitCountsLua)
	permitLeftScript    = wire.NewScript(permitsLua + permitLeftLua)
	permitExtendScript  = wire.NewScript(permitsLua + permitExtendLua)
	permitRenewScript   = wire.NewScript(permitRenewLua)
)

// Forever is the option for a permit that never comes back by itself: it is neither
// renewed nor does it expire. If its process dies it is gone until somebody gives it
// back by its id. It is what Redisson does without a lease.
var Forever = lock.Lease(lock.NoExpiry)

// MaxBatch is how many permits one call can take or give back at most: it bounds for
// how long a script keeps the server.
const MaxBatch = 10_000

// Expirable is a semaphore whose permits have an identity and a lease. It is made by
// Client.PermitSemaphore, immutable, and may be used concurrently. All its methods
// return an error that matches lock.ErrInvalid for a bad name, number or id, and
// lock.ErrClosed once the client is closed.
//
// A permit is taken in one of three ways: with lock.Lease for a fixed time; without an
// option, to be renewed by the watchdog until it is released, so that it comes back
// within the watchdog timeout if its process dies; or with Forever. All times are
// counted by the clock of the server, where Redisson counts them by the clock of each
// client.
//
// On the server it has to be made, by TrySetPermits, SetPermits or AddPermits: until
// then it has no permits.
type Expirable struct{ pool }

// NewExpirable returns the semaphore of that name. It is called by the client.
func NewExpirable(s *session.Session, name string) *Expirable {
	return &Expirable{newPool(s, kindExpirable, name, scripts{permitAcquireScript, permitUndoScript, permitReleaseScript})}
}

// Name returns the name the semaphore was asked for with.
func (e *Expirable) Name() string { return e.name }

// TrySetPermits makes the semaphore with so many permits and reports whether it did:
// one that is there already is left as it is. It blocks for one round trip, or for up
// to 5 s if the server does not answer; the error then matches lock.ErrIndeterminate.
func (e *Expirable) TrySetPermits(ctx context.Context, permits int) (bool, error) {
	return e.set(ctx, permits, 0)
}

// SetPermits sets how many permits there are, those that are taken included. If more
// are taken than that, fewer than none are free, until enough come back. It blocks as
// TrySetPermits does.
func (e *Expirable) SetPermits(ctx context.Context, permits int) error {
	_, err := e.change(ctx, "set the permits of", permits, permitSetScript, strconv.Itoa(permits))
	return err
}

// AddPermits changes how many permits there are, by a number that may be negative. It
// blocks as TrySetPermits does.
func (e *Expirable) AddPermits(ctx context.Context, delta int) error {
	return e.add(ctx, delta, "delta")
}

// Acquire takes a permit, waiting until one is free, ctx ends, or lock.Wait runs out.
// Its errors are those of lock.Locker.Lock: after any of them it has taken none, or
// gives it back in the background. Like there, ctx bounds the wait and is the parent
// of the permit's context.
func (e *Expirable) Acquire(ctx context.Context, opts ...lock.Option) (*Permit, error) {
	return single(e.AcquireN(ctx, 1, opts...))
}

// AcquireN is Acquire for several permits, all or none; none, if n is 0. Each has a
// life of its own from then on. n is MaxBatch at most.
func (e *Expirable) AcquireN(ctx context.Context, n int, opts ...lock.Option) ([]*Permit, error) {
	o, err := lock.ResolvePermit(opts...)
	if err != nil {
		return nil, err
	}
	return e.take(ctx, n, o, o.Bounded && o.Wait == 0)
}

// TryAcquire makes one attempt to take a permit, which blocks for one round trip. If
// none is free, or somebody else has waited for it for long, the error matches
// lock.ErrNotAcquired; otherwise it is as Acquire. lock.Wait is not a valid option.
func (e *Expirable) TryAcquire(ctx context.Context, opts ...lock.Option) (*Permit, error) {
	return single(e.TryAcquireN(ctx, 1, opts...))
}

// TryAcquireN is TryAcquire for several permits, all or none.
func (e *Expirable) TryAcquireN(ctx context.Context, n int, opts ...lock.Option) ([]*Permit, error) {
	o, err := lock.ResolvePermit(opts...)
	if err != nil {
		return nil, err
	}
	if o.Bounded {
		return nil, fmt.Errorf("%w: Wait: TryAcquire does not wait", lock.ErrInvalid)
	}
	return e.take(ctx, n, o, true)
}

func single(permits []*Permit, err error) (*Permit, error) {
	if err != nil {
		return nil, err
	}
	return permits[0], nil
}

func (e *Expirable) take(ctx context.Context, n int, o lock.Options, once bool) ([]*Permit, error) {
	if err := e.check(ctx); err != nil {
		return nil, err
	}
	if n < 0 || n > MaxBatch {
		return nil, fmt.Errorf("%w: %d permits: must be from 0 to %d", lock.ErrInvalid, n, MaxBatch)
	}
	if n == 0 {
		return nil, nil
	}
	g := grant{permits: n, lease: o.Lease, forever: o.Lease == lock.NoExpiry}
	switch {
	case g.forever:
		g.lease = lock.MaxLease
	case o.Lease == 0:
		g.lease = e.s.WatchdogTimeout
	}
	if !e.s.Enter() {
		return nil, lock.ErrClosed
	}
	defer e.s.Leave()
	r, err := e.acquire(ctx, g, o, once)
	if err != nil {
		return nil, err
	}
	return e.begin(ctx, r, o)
}

// Release gives permits back by their ids, in whatever process they were taken: all of
// them, or none and an error that matches lock.ErrNotHeld if one is not taken or has
// expired. Permits of this client end by it like by Permit.Release, once the server
// has confirmed it or if it never answered. It always tries, also when ctx has ended already, and blocks until
// the server has answered, for some 5 s at most; an error that matches
// lock.ErrIndeterminate says that it never did, and that the background goes on. It
// does nothing for no ids.
func (e *Expirable) Release(ctx context.Context, ids ...string) error {
	released, err := e.TryRelease(ctx, ids...)
	if err == nil && !released && len(ids) > 0 {
		return fmt.Errorf("%w: a permit of %q among %d is not taken, or has expired", lock.ErrNotHeld, e.name, len(ids))
	}
	return err
}

// TryRelease is Release, but reports whether the permits were given back instead of an
// error when one is not taken or has expired.
func (e *Expirable) TryRelease(ctx context.Context, ids ...string) (bool, error) {
	if err := e.check(ctx); err != nil {
		return false, err
	}
	raw, err := parseIDs(ids)
	if err != nil || len(raw) == 0 {
		return false, err
	}
	if !e.s.Enter() { // or Close might not let it give back
		return false, lock.ErrClosed
	}
	defer e.s.Leave()
	own := e.own(raw)
	for _, p := range own {
		p.suspend(true)
	}
	result, err := e.release(context.WithoutCancel(ctx), patience, grant{permits: len(raw), ids: raw}, false)
	switch {
	case err == nil && result == releaseDone, errors.Is(err, lock.ErrIndeterminate):
		for _, p := range own {
			p.finish()
		}
	default:
		for _, p := range own {
			p.suspend(false)
			if err == nil && len(raw) == 1 { // else it may be another that is gone
				p.Lost(lock.ReasonGone, nil)
			}
		}
	}
	if err != nil {
		return false, fmt.Errorf("redlatch: release permits of %q: %w", e.name, err)
	}
	return result == releaseDone, nil
}

// Permits returns how many permits there are, taken and free. It writes nothing and
// blocks for one round trip.
func (e *Expirable) Permits(ctx context.Context) (int, error) {
	free, taken, err := e.counts(ctx)
	return free + taken, err
}

// Available returns how many permits are free, those that have expired included, and
// less than 0 if more are taken than there are by now. It writes nothing and blocks
// for one round trip.
func (e *Expirable) Available(ctx context.Context) (int, error) {
	free, _, err := e.counts(ctx)
	return free, err
}

// Acquired returns how many permits are taken and have not expired. It writes nothing
// and blocks for one round trip.
func (e *Expirable) Acquired(ctx context.Context) (int, error) {
	_, taken, err := e.counts(ctx)
	return taken, err
}

func (e *Expirable) counts(ctx context.Context) (free, taken int, err error) {
	if err := e.check(ctx); err != nil {
		return 0, 0, err
	}
	reply, err := permitCountsScript.Exec(ctx, e.s.Client, []string{e.key, wire.PermitTimeouts(e.key)}, nil).AsIntSlice()
	if err != nil {
		return 0, 0, fmt.Errorf("redlatch: look at %q: %w", e.name, err)
	}
	return int(reply[0]), int(reply[1]), nil
}

// LeaseTime returns what is left of a permit's lease: lock.NoExpiry if it never
// expires, an error that matches lock.ErrNotHeld if it is not taken or has expired. It
// writes nothing and blocks for one round trip.
func (e *Expirable) LeaseTime(ctx context.Context, id string) (time.Duration, error) {
	if err := e.check(ctx); err != nil {
		return 0, err
	}
	raw, err := parseID(id)
	if err != nil {
		return 0, err
	}
	left, err := permitLeftScript.Exec(ctx, e.s.Client, []string{e.key, wire.PermitTimeouts(e.key)}, []string{raw}).AsInt64()
	switch {
	case err != nil:
		return 0, fmt.Errorf("redlatch: look at %q: %w", e.name, err)
	case left == -1:
		return lock.NoExpiry, nil
	case left < 0:
		return 0, fmt.Errorf("%w: permit %s of %q is not taken, or has expired", lock.ErrNotHeld, id, e.name)
	default:
		return time.Duration(left) * time.Millisecond, nil
	}
}

// UpdateLeaseTime makes a permit expire when lease is over, counted from now, sooner or
// later than it would have, or never for lock.NoExpiry, and reports whether it is
// taken. One of this client is not renewed any more. Nobody who waits is told of it: they
// look when the permit would have expired, or a message comes, or after 5 s. It blocks
// for one round trip; if its reply is lost the permit may expire at either time, and this
// client goes by the earlier.
func (e *Expirable) UpdateLeaseTime(ctx context.Context, id string, lease time.Duration) (bool, error) {
	if err := e.check(ctx); err != nil {
		return false, err
	}
	raw, err := parseID(id)
	if err != nil {
		return false, err
	}
	forever := lease == lock.NoExpiry
	if err := lock.CheckLease(lease); err != nil && !forever {
		return false, err
	}
	if forever {
		lease = lock.MaxLease
	}
	if ctx.Err() != nil {
		return false, fmt.Errorf("redlatch: update the lease of a permit of %q: %w", e.name, context.Cause(ctx))
	}
	own := e.own([]string{raw})
	for _, p := range own { // one at most
		if err := p.takeTurn(ctx); err != nil {
			return false, fmt.Errorf("redlatch: update the lease of a permit of %q: %w", e.name, err)
		}
		defer p.endTurn()
	}
	sent := time.Now()
	for _, p := range own {
		if lease < p.lease.Remaining() {
			p.fix(sent, lease, false) // before anybody else can have it
		}
	}
	taken, err := e.extend(ctx, raw, leaseArg(lease, forever), "just")
	if err != nil {
		return false, fmt.Errorf("redlatch: update the lease of a permit of %q: %w", e.name, err)
	}
	for _, p := range own {
		if taken {
			p.fix(sent, lease, forever)
		} else {
			p.Lost(lock.ReasonGone, nil)
		}
	}
	return taken, nil
}

func (e *Expirable) extend(ctx context.Context, raw, lease, how string) (bool, error) {
	n, err := permitExtendScript.Exec(ctx, e.s.Client, []string{e.key, wire.PermitTimeouts(e.key)}, []string{raw, lease, how}).AsInt64()
	return n == 1, err
}

// idSize is how many bytes a permit is on the server.
const idSize = 16

// newIDs returns n ids as the server has them.
func newIDs(n int) []string {
	random := make([]byte, idSize*n)
	_, _ = rand.Read(random) // never fails: crypto/rand aborts the program instead
	all := string(random)
	ids := make([]string, n)
	for i := range ids {
		ids[i] = all[i*idSize : (i+1)*idSize]
	}
	return ids
}

// parseID turns an id as users have it into one as the server has it.
func parseID(id string) (string, error) {
	raw, err := hex.DecodeString(id)
	if err != nil || len(raw) != idSize {
		return "", fmt.Errorf("%w: %q is no permit: an id has %d hexadecimal digits", lock.ErrInvalid, id, 2*idSize)
	}
	return string(raw), nil
}

func parseIDs(ids []string) ([]string, error) {
	if len(ids) > MaxBatch {
		return nil, fmt.Errorf("%w: %d permits: %d at most at once", lock.ErrInvalid, len(ids), MaxBatch)
	}
	all := make([]string, len(ids))
	seen := make(map[string]struct{}, len(ids))
	for i, id := range ids {
		raw, err := parseID(id)
		if err != nil {
			return nil, err
		}
		if _, twice := seen[raw]; twice {
			return nil, fmt.Errorf("%w: permit %s is given twice", lock.ErrInvalid, id)
		}
		seen[raw] = struct{}{}
		all[i] = raw
	}
	return all, nil
}

package semaphore

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/hold"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Permit is an acquired permit of an Expirable. It must be released once, with Release or by
// its id. A renewed permit that becomes unreachable earlier is logged and released, unless
// ID was called. All methods are safe for concurrent use.
type Permit struct {
	p      *permit
	handle *hold.Handle
}

// ID returns the id of the permit, 32 hexadecimal digits. Expirable.Release releases the
// permit by its id, in any process, so a permit whose ID was called is not released when it
// becomes unreachable.
func (p *Permit) ID() string {
	p.handle.Disarm()
	return p.p.id()
}

// Name returns the name of the semaphore.
func (p *Permit) Name() string { return p.p.Name() }

// Context returns a child of the context given to Acquire that is canceled when the permit
// ends. context.Cause returns the reason: a *lock.LostError if the permit was lost,
// context.Canceled if it was released (by Release: before the request is sent), or the
// parent's cause if the parent was canceled, which does not release the permit. Context never
// blocks and always returns the same context. The context does not keep the permit alive:
// keep the Permit or its id.
func (p *Permit) Context() context.Context { return p.p.Context() }

// Remaining returns how long the permit is certain to stay acquired, by the local monotonic
// clock: 0 after it has ended, lock.NoExpiry if it never expires.
func (p *Permit) Remaining() time.Duration { return p.handle.Remaining() }

// Extend extends the lease to at least lease from now; it never shortens it. It blocks for
// one round trip. It returns an error that matches lock.ErrLost if the permit is no longer
// held, lock.ErrNotHeld after Release (even if that has reported a loss), lock.ErrInvalid if lease is less than a millisecond, or
// the error of the connection; in that case Remaining is unchanged.
func (p *Permit) Extend(ctx context.Context, lease time.Duration) error {
	return p.handle.Extend(ctx, lease)
}

// Release releases the permit. It tries even if ctx is done, and blocks until the server has
// answered, for about 5 s at most. It returns lock.ErrNotHeld if the permit was released
// before, an error that matches lock.ErrLost (a *lock.LostError) if it was lost before, and
// one that matches lock.ErrIndeterminate if the server did not answer. In that case the
// retries continue in the background, and the lease, if any, frees the permit at the latest.
func (p *Permit) Release(ctx context.Context) error { return p.handle.Unlock(ctx) }

// permit is the hold of a Permit.
type permit struct {
	hold.State
	e   *Expirable
	raw string // the id in the form of the server

	lease   watchdog.Lease
	leaseMu chan struct{} // a mutex: see lockLease

	mu        sync.Mutex
	forever   bool
	releasing int  // releases by id in progress
	missing   bool // the server does not have it, perhaps because of one of them
}

// registry contains the permits of one client by their ids. The zero registry is ready for
// use.
type registry struct{ permits sync.Map }

type permitKey struct{ key, raw string }

func (p *permit) registration() (*registry, permitKey) {
	return session.Of[registry](p.e.s), permitKey{p.e.key, p.raw}
}

// local returns those of the given permits that this client holds.
func (e *Expirable) local(raw []string) []*permit {
	var local []*permit
	for _, id := range raw {
		if p, ok := session.Of[registry](e.s).permits.Load(permitKey{e.key, id}); ok {
			local = append(local, p.(*permit))
		}
	}
	return local
}

// newPermits returns the permits of a served request.
func (e *Expirable) newPermits(ctx context.Context, r *request, o lock.Options) ([]*Permit, error) {
	g := r.grant
	terms := watchdog.Terms{Sent: r.sent, TTL: g.lease, MaxHold: o.MaxHold}
	if o.Lease == 0 {
		terms.Renewer = renewer{e.s.Client}
	}
	site := callsite.Here(2, 3) // newPermits and take
	permits := make([]*Permit, len(g.ids))
	watched := true
	for i, raw := range g.ids {
		p := &permit{e: e, raw: raw, forever: g.forever, leaseMu: make(chan struct{}, 1)}
		p.Site = site
		p.Begin(e.s.Telemetry.StartPermit(ctx, e.telemetryLock(), p.id()))
		p.lease.Key, p.lease.Owner = wire.PermitTimeouts(e.key), raw
		reg, key := p.registration()
		reg.permits.Store(key, p)
		watched = e.s.Watchdog.Watch(&p.lease, p, terms) && watched
		permits[i] = &Permit{p: p, handle: &hold.Handle{Hold: p}}
		permits[i].handle.Arm()
	}
	var err error
	switch {
	case !watched || e.s.Err() != nil: // the client is closing, and waits for this call
		err = lock.ErrClosed
	case time.Since(r.sent) >= g.lease:
		// This process was suspended until the lease was over.
		err = lock.ErrNotAcquired
	default:
		return permits, nil
	}
	for _, p := range permits {
		p.handle.Disarm()
		p.p.end()
	}
	e.giveBack([]grant{g})
	return nil, err
}

func (p *permit) id() string { return hex.EncodeToString([]byte(p.raw)) }

// Name implements lock.Hold.
func (p *permit) Name() string { return p.e.name }

// Owner and Token complete lock.Hold.
func (p *permit) Owner() lock.Owner { return lock.Owner{} }
func (p *permit) Token() int64      { return 0 }

// Dropped implements hold.Hold. A permit that is not renewed becomes free at its end.
func (p *permit) Dropped() {
	if !p.lease.Renewed() {
		return
	}
	p.e.s.Go(func(ctx context.Context) {
		p.e.s.Logger.Error("redlatch: a permit was dropped without Release; releasing it",
			"name", p.e.name, "kind", p.e.kind, "permit", p.id(), "acquired", p.Site.String())
		_ = p.Unlock(ctx)
	})
}

// Lost implements watchdog.Holder.
func (p *permit) Lost(reason lock.Reason, cause error) {
	p.mu.Lock()
	// Only the answer of a release in progress tells whether it is lost or released.
	unclear := reason == lock.ReasonGone && p.releasing > 0
	p.missing = p.missing || unclear
	p.mu.Unlock()
	if unclear || !p.Lose(p.lostError(reason, cause)) {
		return
	}
	p.lease.Forget()
	p.unregister()
	p.EndSpan(p.e.s.Go)
}

func (p *permit) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: p.e.name, Permit: p.id(), Reason: reason, When: time.Now(), Err: cause}
}

func (p *permit) unregister() {
	reg, key := p.registration()
	reg.permits.Delete(key)
}

// Remaining implements lock.Hold.
func (p *permit) Remaining() time.Duration {
	left := p.lease.Remaining()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.forever && left > lock.MaxLease/2 { // less is the rest of MaxHold
		return lock.NoExpiry
	}
	return left
}

// startRelease precedes a release by id. When its answer has been applied, endRelease follows.
func (p *permit) startRelease() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.releasing++
}

func (p *permit) endRelease() {
	p.mu.Lock()
	p.releasing--
	missing := p.missing
	p.mu.Unlock()
	if missing {
		p.Lost(lock.ReasonGone, nil)
	}
}

// end ends a permit that was released by its id.
func (p *permit) end() {
	if p.End("Release", p.e.name) == nil {
		p.lease.Forget()
		p.unregister()
		p.Span.End(nil)
	}
}

// lockLease precedes a request that changes the lease, and unlockLease follows it. If two
// such requests were in progress, the order in which the server runs them would be unknown,
// and this client could overestimate the lease.
func (p *permit) lockLease(ctx context.Context) error {
	select {
	case p.leaseMu <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *permit) unlockLease() { <-p.leaseMu }

// setLease sets the local lease, which is not renewed.
func (p *permit) setLease(sent time.Time, ttl time.Duration, forever bool) {
	p.mu.Lock()
	p.forever = forever
	p.mu.Unlock()
	p.lease.Fix(sent, ttl)
}

// Extend implements lock.Hold.
func (p *permit) Extend(ctx context.Context, lease time.Duration) error {
	p.lease.Check()
	if err := p.Err("Extend", p.e.name); err != nil {
		return err
	}
	if err := p.lockLease(ctx); err != nil {
		return fmt.Errorf("redlatch: extend a permit of %q: %w", p.e.name, err)
	}
	defer p.unlockLease()
	sent := time.Now()
	acquired, err := p.e.extend(ctx, p.raw, wire.Millis(lease), "least")
	if err != nil {
		return fmt.Errorf("redlatch: extend a permit of %q: %w", p.e.name, err)
	}
	if acquired {
		p.lease.Extended(sent, lease)
	} else {
		p.Lost(lock.ReasonGone, nil)
	}
	return p.Err("Extend", p.e.name)
}

// Unlock implements lock.Hold.
func (p *permit) Unlock(ctx context.Context) error {
	if p.e.s.Enter() { // Close waits for the release
		defer p.e.s.Leave()
	}
	p.lease.Check()
	g := grant{permits: 1, ids: []string{p.raw}}
	if err := p.End("Release", p.e.name); err != nil {
		if errors.Is(err, lock.ErrLost) {
			// The server may still have it.
			p.e.s.Go(func(ctx context.Context) { _, _ = p.e.pool.release(ctx, patience, g, false) })
		}
		return err
	}
	p.lease.Forget()
	p.unregister()
	ctx, released := p.StartRelease(ctx)
	result, err := p.e.pool.release(ctx, patience, g, false)
	switch {
	case err == nil && result == releaseAbsent:
		err = p.lostError(lock.ReasonGone, nil)
	case wire.IsWrongType(err):
		err = p.lostError(lock.ReasonGone, err) // the key is no longer this semaphore
	case err != nil:
		err = fmt.Errorf("redlatch: release a permit of %q: %w", p.e.name, err)
	}
	return p.Released(released, err)
}

// renewer renews the leases of permits.
type renewer struct{ client rueidis.Client }

// Renew implements watchdog.Renewer.
func (r renewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, shared bool) []watchdog.Renewed {
	return locking.RenewBatches(ctx, r.client, permitRenewScript, batches, ttl, shared, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner)
	})
}

package semaphore

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Permit is an acquired permit of an Expirable. It must be released once, with Release or by
// its id. A renewed permit that becomes unreachable earlier is logged and released, unless
// ID was called. All methods are safe for concurrent use.
type Permit struct {
	p       *permit
	idKnown atomic.Bool // ID was called
	cleanup runtime.Cleanup
}

// ID returns the id of the permit, 32 hexadecimal digits. Expirable.Release releases the
// permit by its id, in any process, so a permit whose ID was called is not released when it
// becomes unreachable.
func (p *Permit) ID() string {
	if !p.idKnown.Swap(true) {
		p.cleanup.Stop()
	}
	return p.p.id()
}

// Name returns the name of the semaphore.
func (p *Permit) Name() string { return p.p.e.name }

// Context returns a child of the context given to Acquire that is canceled when the permit
// ends. context.Cause returns the reason: a *lock.LostError if the permit was lost,
// context.Canceled if it was released (by Release: before the request is sent), or the
// parent's cause if the parent was canceled, which does not release the permit. Context never
// blocks and always returns the same context. The context does not keep the permit alive:
// keep the Permit or its id.
func (p *Permit) Context() context.Context { return p.p.context() }

// Remaining returns how long the permit is certain to stay acquired, by the local monotonic
// clock: 0 after it has ended, lock.NoExpiry if it never expires.
func (p *Permit) Remaining() time.Duration {
	d := p.p.remaining()
	runtime.KeepAlive(p)
	return d
}

// Extend extends the lease to at least lease from now; it never shortens it. It blocks for
// one round trip. It returns an error that matches lock.ErrLost if the permit is no longer
// held, lock.ErrNotHeld after Release, lock.ErrInvalid if lease is less than a millisecond, or
// the error of the connection; in that case Remaining is unchanged.
func (p *Permit) Extend(ctx context.Context, lease time.Duration) error {
	err := p.p.extend(ctx, lease)
	runtime.KeepAlive(p)
	return err
}

// Release releases the permit. It tries even if ctx is done, and blocks until the server has
// answered, for about 5 s at most. It returns lock.ErrNotHeld if the permit was released
// before, an error that matches lock.ErrLost (a *lock.LostError) if it was lost before, and
// one that matches lock.ErrIndeterminate if the server did not answer. In that case the
// retries continue in the background, and the lease, if any, frees the permit at the latest.
func (p *Permit) Release(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	p.cleanup.Stop()
	err := p.p.release(ctx)
	runtime.KeepAlive(p)
	return err
}

// permit is the state of a Permit:
//
//	held ──Release──▶ ended
//	  │                 ▲
//	  └─Lost──▶ lost ───┘ (Release reports the loss)
type permit struct {
	e    *Expirable
	raw  string // the id in the form of the server
	site callsite.Site

	lease   watchdog.Lease
	leaseMu chan struct{} // a mutex: see lockLease

	mu        sync.Mutex
	state     permitState
	releasing bool // a release by id is in progress: a missing permit is not lost
	gone      bool // it was missing meanwhile
	forever   bool
	lost      *lock.LostError
	parent    context.Context // the parent of ctx
	ctx       context.Context // created by the first call of Context
	cancel    context.CancelCauseFunc
	span      *telemetry.Hold
}

type permitState uint8

const (
	held permitState = iota
	lost
	ended
)

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
		p := &permit{e: e, raw: raw, site: site, forever: g.forever, leaseMu: make(chan struct{}, 1)}
		p.parent, p.span = e.s.Telemetry.StartPermit(ctx, e.telemetryLock(), p.id())
		p.lease.Key, p.lease.Owner = wire.PermitTimeouts(e.key), raw
		reg, key := p.registration()
		reg.permits.Store(key, p)
		watched = e.s.Watchdog.Watch(&p.lease, p, terms) && watched
		permits[i] = &Permit{p: p}
		if terms.Renewer != nil {
			permits[i].cleanup = runtime.AddCleanup(permits[i], dropped, p)
		}
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
		p.cleanup.Stop()
		p.p.end()
	}
	e.giveBack([]grant{g})
	return nil, err
}

func (p *permit) id() string { return hex.EncodeToString([]byte(p.raw)) }

// dropped runs when a Permit was garbage collected.
func dropped(p *permit) {
	p.mu.Lock()
	state := p.state
	p.mu.Unlock()
	if state != held || !p.lease.Renewed() {
		return
	}
	p.e.s.Logger.Error("redlatch: a permit was dropped without Release; releasing it",
		"name", p.e.name, "kind", p.e.kind, "permit", p.id(), "acquired", p.site.String())
	p.e.s.Go(func(ctx context.Context) { _ = p.release(ctx) })
}

// Lost implements watchdog.Holder.
func (p *permit) Lost(reason lock.Reason, cause error) {
	p.mu.Lock()
	if p.releasing && reason == lock.ReasonGone {
		p.gone = true
		p.mu.Unlock()
		return
	}
	if p.state != held {
		p.mu.Unlock()
		return
	}
	p.state = lost
	p.lease.Forget()
	p.lost = p.lostError(reason, cause)
	p.endContext(p.lost)
	lostErr := p.lost
	p.mu.Unlock()
	p.unregister()
	// In the background: this may be the watchdog's goroutine, and an exporter may block.
	if !p.e.s.Go(func(context.Context) { p.span.End(lostErr) }) {
		p.span.End(lostErr)
	}
}

// RenewalFailed implements watchdog.Holder.
func (p *permit) RenewalFailed(err error, left time.Duration) { p.span.RenewalFailed(err, left) }

func (p *permit) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: p.e.name, Permit: p.id(), Reason: reason, When: time.Now(), Err: cause}
}

func (p *permit) unregister() {
	reg, key := p.registration()
	reg.permits.Delete(key)
}

// endContext cancels the permit's context. p.mu is held.
func (p *permit) endContext(cause error) {
	if p.cancel != nil {
		p.cancel(cause)
	}
}

func (p *permit) context() context.Context {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx == nil {
		p.ctx, p.cancel = context.WithCancelCause(p.parent)
		switch p.state {
		case lost:
			p.cancel(p.lost)
		case ended:
			p.cancel(context.Canceled)
		}
	}
	return p.ctx
}

func (p *permit) remaining() time.Duration {
	left := p.lease.Remaining()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.forever && left > lock.MaxLease/2 { // less is the rest of MaxHold
		return lock.NoExpiry
	}
	return left
}

// setReleasing(true) precedes a release by id. setReleasing(false) follows if that failed.
func (p *permit) setReleasing(releasing bool) {
	p.mu.Lock()
	p.releasing = releasing
	gone := p.gone && !releasing
	p.mu.Unlock()
	if gone {
		p.Lost(lock.ReasonGone, nil)
	}
}

// end ends a permit that was released by its id.
func (p *permit) end() {
	p.mu.Lock()
	if p.state != held {
		p.mu.Unlock()
		return
	}
	p.state = ended
	p.endContext(context.Canceled)
	p.mu.Unlock()
	p.lease.Forget()
	p.unregister()
	p.span.End(nil)
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

func (p *permit) extend(ctx context.Context, lease time.Duration) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	if err := lock.CheckLease(lease); err != nil {
		return err
	}
	p.lease.Check()
	if err := p.err(); err != nil {
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
	return p.err()
}

// err returns an error if the permit has ended.
func (p *permit) err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.lost != nil:
		return p.lost
	case p.state != held:
		return fmt.Errorf("%w: permit %s of %q was released", lock.ErrNotHeld, p.id(), p.e.name)
	default:
		return nil
	}
}

func (p *permit) release(ctx context.Context) error {
	if p.e.s.Enter() { // Close waits for the release
		defer p.e.s.Leave()
	}
	p.lease.Check()
	g := grant{permits: 1, ids: []string{p.raw}}
	p.mu.Lock()
	switch p.state {
	case held:
		p.state = ended
		p.endContext(context.Canceled) // before another client can acquire the permit
		p.mu.Unlock()
	case lost:
		p.state = ended
		err := p.lost
		p.mu.Unlock()
		// The server may still have it.
		p.e.s.Go(func(ctx context.Context) { _, _ = p.e.pool.release(ctx, patience, g, false) })
		return err
	default:
		p.mu.Unlock()
		return fmt.Errorf("%w: permit %s of %q was released", lock.ErrNotHeld, p.id(), p.e.name)
	}
	p.lease.Forget()
	p.unregister()
	ctx, done := p.span.StartRelease(ctx)
	result, err := p.e.pool.release(context.WithoutCancel(ctx), patience, g, false)
	switch {
	case err == nil && result == releaseAbsent:
		err = p.lostError(lock.ReasonGone, nil)
	case wire.IsWrongType(err):
		err = p.lostError(lock.ReasonGone, err) // the key is no longer this semaphore
	case err != nil:
		err = fmt.Errorf("redlatch: release a permit of %q: %w", p.e.name, err)
	}
	done(err)
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	p.span.End(lostErr)
	return err
}

// renewer renews the leases of permits.
type renewer struct{ client rueidis.Client }

// Renew implements watchdog.Renewer.
func (r renewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, dedicated bool) []watchdog.Renewed {
	return locking.RenewBatches(ctx, r.client, permitRenewScript, batches, ttl, dedicated, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner)
	})
}

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

// Permit is a permit of an Expirable. It must be given back with Release, once, or by
// its id. One that is renewed and becomes unreachable before that is logged and given
// back, unless somebody has asked for its id. All methods may be called concurrently,
// from any goroutine.
type Permit struct {
	p       *permit
	named   atomic.Bool // somebody knows its id
	cleanup runtime.Cleanup
}

// ID returns the id of the permit, 32 hexadecimal digits: whoever has it can give the
// permit back (see Expirable.Release), so from then on that is up to them.
func (p *Permit) ID() string {
	if !p.named.Swap(true) {
		p.cleanup.Stop()
	}
	return p.p.id()
}

// Name returns the name of the semaphore.
func (p *Permit) Name() string { return p.p.e.name }

// Context returns a child of the context given to Acquire that ends when the permit
// does. context.Cause says why: a *lock.LostError when it was lost, context.Canceled
// when it was given back (before that is sent, if by Release), the parent's cause when
// the parent ended, which does not give it back. It never blocks and returns the same
// context at every call. It does not keep the permit alive: keep the Permit, or its id.
func (p *Permit) Context() context.Context { return p.p.context() }

// Remaining returns for how long it is certain that the permit is taken, by the local
// monotonic clock: 0 once it has ended, lock.NoExpiry if it never expires.
func (p *Permit) Remaining() time.Duration {
	d := p.p.remaining()
	runtime.KeepAlive(p)
	return d
}

// Extend makes the permit last at least lease from now; it never shortens it. It
// blocks for one round trip. It returns an error that matches lock.ErrLost if the
// permit is no longer held, lock.ErrNotHeld after Release, lock.ErrInvalid if lease is
// under a millisecond, or the error of the connection, in which case the permit is as
// certain as before.
func (p *Permit) Extend(ctx context.Context, lease time.Duration) error {
	err := p.p.extend(ctx, lease)
	runtime.KeepAlive(p)
	return err
}

// Release gives the permit back. It always tries, also when ctx has ended already, and
// blocks until the server has answered, for some 5 s at most. It returns
// lock.ErrNotHeld if the permit was given back before, an error that matches
// lock.ErrLost (a *lock.LostError) if it was lost before, and one that matches
// lock.ErrIndeterminate if the server never answered; the release is then tried
// further in the background, and the lease, if there is one, bounds it.
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
	raw  string // the id as the server has it
	site callsite.Site

	lease watchdog.Lease
	turn  chan struct{} // of those who change when it expires: see takeTurn

	mu        sync.Mutex
	state     permitState
	suspended bool // somebody is giving it back by its id: that it is gone is no loss
	gone      bool // it was gone then
	forever   bool
	lost      *lock.LostError
	parent    context.Context // Context is a child of it, made when asked for
	ctx       context.Context // what Context returns
	cancel    context.CancelCauseFunc
	span      *telemetry.Hold
}

type permitState uint8

const (
	held permitState = iota
	lost
	ended
)

// registry is the permits of one client, so that one can be found by its id. The zero
// registry is ready for use.
type registry struct{ permits sync.Map }

type permitKey struct{ key, raw string }

func (p *permit) registered() (*registry, permitKey) {
	return session.Of[registry](p.e.s), permitKey{p.e.key, p.raw}
}

// own returns those of some permits that this client has.
func (e *Expirable) own(raw []string) []*permit {
	var own []*permit
	for _, id := range raw {
		if p, ok := session.Of[registry](e.s).permits.Load(permitKey{e.key, id}); ok {
			own = append(own, p.(*permit))
		}
	}
	return own
}

// begin makes permits of what a request has got.
func (e *Expirable) begin(ctx context.Context, r *request, o lock.Options) ([]*Permit, error) {
	g := r.grant
	terms := watchdog.Terms{Sent: r.sent, TTL: g.lease, MaxHold: o.MaxHold}
	if o.Lease == 0 {
		terms.Renewer = renewer{e.s.Client}
	}
	site := callsite.Here(2, 3) // begin and take
	permits := make([]*Permit, len(g.ids))
	watched := true
	for i, raw := range g.ids {
		p := &permit{e: e, raw: raw, site: site, forever: g.forever, turn: make(chan struct{}, 1)}
		p.parent, p.span = e.s.Telemetry.StartPermit(ctx, e.described(), p.id())
		p.lease.Key, p.lease.Owner = wire.PermitTimeouts(e.key), raw
		reg, key := p.registered()
		reg.permits.Store(key, p)
		watched = e.s.Dog.Watch(&p.lease, p, terms) && watched
		permits[i] = &Permit{p: p}
		if terms.Renewer != nil {
			permits[i].cleanup = runtime.AddCleanup(permits[i], dropped, p)
		}
	}
	var err error
	switch {
	case !watched || e.s.Err() != nil: // the client is being closed, and waits for this
		err = lock.ErrClosed
	case time.Since(r.sent) >= g.lease:
		// This process slept through the lease.
		err = lock.ErrNotAcquired
	default:
		return permits, nil
	}
	for _, p := range permits {
		p.cleanup.Stop()
		p.p.finish()
	}
	e.giveBack([]grant{g})
	return nil, err
}

func (p *permit) id() string { return hex.EncodeToString([]byte(p.raw)) }

// dropped runs when a Permit was collected.
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
	if p.suspended && reason == lock.ReasonGone {
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
	// Not here: this may be the watchdog's goroutine, and an exporter may block.
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
	reg, key := p.registered()
	reg.permits.Delete(key)
}

// endContext ends the permit's context. p.mu is held.
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
	if p.forever && left > lock.MaxLease/2 { // and no MaxHold
		return lock.NoExpiry
	}
	return left
}

// suspend is called with true before somebody gives the permit back by its id, and
// with false if that did not happen.
func (p *permit) suspend(suspended bool) {
	p.mu.Lock()
	p.suspended = suspended
	gone := p.gone && !suspended
	p.mu.Unlock()
	if gone {
		p.Lost(lock.ReasonGone, nil)
	}
}

// finish ends a permit that was given back by its id.
func (p *permit) finish() {
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

// takeTurn is called before a request that changes when the permit expires, and endTurn
// after it then. Of two requests under way at once it would not be known which the server
// had last, and the permit could be taken to last for longer than it does.
func (p *permit) takeTurn(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *permit) endTurn() { <-p.turn }

// fix notes that the permit ends when ttl is over, or never.
func (p *permit) fix(sent time.Time, ttl time.Duration, forever bool) {
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
	if err := p.ended(); err != nil {
		return err
	}
	if err := p.takeTurn(ctx); err != nil {
		return fmt.Errorf("redlatch: extend a permit of %q: %w", p.e.name, err)
	}
	defer p.endTurn()
	sent := time.Now()
	taken, err := p.e.extend(ctx, p.raw, wire.Millis(lease), "least")
	if err != nil {
		return fmt.Errorf("redlatch: extend a permit of %q: %w", p.e.name, err)
	}
	if taken {
		p.lease.Extended(sent, lease)
	} else {
		p.Lost(lock.ReasonGone, nil)
	}
	return p.ended()
}

// ended returns how the permit has ended, if it has.
func (p *permit) ended() error {
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
	if p.e.s.Enter() { // or Close might not let it give back
		defer p.e.s.Leave()
	}
	p.lease.Check()
	g := grant{permits: 1, ids: []string{p.raw}}
	p.mu.Lock()
	switch p.state {
	case held:
		p.state = ended
		p.endContext(context.Canceled) // before anybody else can have the permit
		p.mu.Unlock()
	case lost:
		p.state = ended
		err := p.lost
		p.mu.Unlock()
		// Should the server still keep it.
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
		err = p.lostError(lock.ReasonGone, err) // whatever is there now is not this semaphore
	case err != nil:
		err = fmt.Errorf("redlatch: release a permit of %q: %w", p.e.name, err)
	}
	done(err)
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	p.span.End(lostErr)
	return err
}

// renewer renews permits.
type renewer struct{ client rueidis.Client }

// Renew implements watchdog.Renewer.
func (r renewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, detour bool) []watchdog.Renewed {
	return locking.RenewBatches(ctx, r.client, permitRenewScript, batches, ttl, detour, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner)
	})
}

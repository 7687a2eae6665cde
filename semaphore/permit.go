package semaphore

import (
	"context"
	"encoding/hex"
	"errors"
	"iter"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Permit is what Acquire has acquired from a PermitSemaphore: one permit, or several
// that end together, with one context and one lease. It must be released once, with Release or by
// its ids, unless Detach leaves it to another process. If one of several permits is lost, or
// released by its id alone, the Permit is lost; Release then releases the others. A renewed Permit
// that becomes unreachable earlier is logged, and no longer renewed: it lasts until its lease ends. All methods
// are safe for concurrent use. A Permit must not be copied.
type Permit struct {
	handle engine.Handle
	p      *permit
}

// ID returns the id of the permit, 32 hexadecimal digits, or the first id of several.
// PermitSemaphore.Release releases the permit by its id, in any process. Use Detach to leave a permit to another
// process.
func (p *Permit) ID() string { return p.p.id() }

// IDs returns the ids of all its permits.
func (p *Permit) IDs() []string {
	ids := make([]string, len(p.p.raw))
	for i, raw := range p.p.raw {
		ids[i] = hex.EncodeToString([]byte(raw))
	}
	return ids
}

// Name returns the name of the semaphore.
func (p *Permit) Name() string { return p.p.Name() }

// Context returns a child of the context given to Acquire, or to lock.Parent, that is
// canceled when the permit ends. context.Cause returns the reason: a *lock.LostError if the
// permit was lost, context.Canceled if it was released (by Release: before the request is
// sent), or the parent's cause if the parent was canceled, which does not release the permit.
// Context never blocks and always returns the same context. The context does not keep the
// permit alive: keep the Permit or its id.
func (p *Permit) Context() context.Context { return p.p.Context() }

// Remaining returns how long the permit is certain to stay acquired, by the local monotonic
// clock: 0 after it has ended, lock.NoExpiry if it never expires.
func (p *Permit) Remaining() time.Duration { return p.handle.Remaining() }

// Extend extends the lease to at least lease from now; it never shortens it. It blocks for
// one round trip. It returns an error that matches lock.ErrLost if the permit is no longer
// held, lock.ErrNotHeld after Release (even if that has reported a loss), lock.ErrInvalid if
// lease is less than a millisecond, or the error of the connection; in that case Remaining is
// unchanged.
func (p *Permit) Extend(ctx context.Context, lease time.Duration) error {
	return p.handle.Extend(ctx, lease)
}

// Detach ends the permit without releasing it, and returns an id with which PermitSemaphore.Adopt,
// in any process, returns a new Permit. Until then the permit is acquired, for lease from now. So
// work under the permit can go on in another process, or after a restart. Several permits are
// detached together, under one id. Detach tries even if ctx is done, and blocks until the server has
// answered, for about 5 s at most.
//
// The error matches lock.ErrInvalid if lease is less than a millisecond; the permit goes on then.
// Other errors are the errors of Release. If the server did not answer or rejects all writes, Detach returns the
// id too, and the retries continue in the background, for 5 minutes at most. If Adopt does not find
// the permit, it becomes free when the lease that it had ends; with Forever, only Release by its id
// frees it.
//
// In the id, the digits before the # are the id of the detached permit, with which Java and
// PermitSemaphore.Release can release it too. The ids of several permits are consecutive numbers.
func (p *Permit) Detach(ctx context.Context, lease time.Duration) (id string, err error) {
	return p.handle.Detach(ctx, lease)
}

// Release releases the permit. It tries even if ctx is done, and blocks until the server has
// answered, for about 5 s at most. It returns lock.ErrNotHeld if the permit was released
// before, an error that matches lock.ErrLost (a *lock.LostError) if it was lost before, and
// one that matches lock.ErrIndeterminate if the server did not answer. If the server rejects all writes for
// a second, Release returns what it says. In both cases the retries continue in the background, and the
// lease, if any, frees the permit at the latest.
func (p *Permit) Release(ctx context.Context) error { return p.handle.Unlock(ctx) }

// permit is the hold of a Permit.
type permit struct {
	engine.State
	e         *PermitSemaphore
	raw       []string // the ids in the form of the server
	lease     watchdog.Lease
	releasing atomic.Int32 // releases by id in progress
	changing  struct {     // a mutex: see changeLease
		once sync.Once
		c    chan struct{}
	}
}

// registry contains the permits of one client by their ids. The zero registry is ready for
// use.
type registry struct {
	mu   sync.Mutex
	byID map[string]*permit
}

// add adds a permit under all of its ids.
func (r *registry) add(p *permit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID == nil {
		r.byID = make(map[string]*permit)
	}
	for _, raw := range p.raw {
		r.byID[raw] = p
	}
}

// remove undoes add. It can be repeated.
func (r *registry) remove(p *permit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, raw := range p.raw {
		delete(r.byID, raw)
	}
}

// find returns the permit with an id, or nil.
func (r *registry) find(raw string) *permit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byID[raw]
}

// all returns each permit once.
func (r *registry) all() (all []*permit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for raw, p := range r.byID {
		if raw == p.raw[0] {
			all = append(all, p)
		}
	}
	return all
}

// Holds yields those that are held.
func (r *registry) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		for _, p := range r.all() {
			h := p.Listed(session.Hold{Kind: p.e.id.Kind, Name: p.Name(), Owner: p.id(), Remaining: p.Remaining()})
			if !h.Site.IsZero() && !yield(h) {
				return
			}
		}
	}
}

// local returns the permit of this client with an id, or nil.
func (s *PermitSemaphore) local(raw string) *permit {
	if p := s.permits.find(raw); p != nil && p.e.key == s.key {
		return p
	}
	return nil
}

// newPermit returns the Permit of a served request, whose context is a child of parent. The
// session is open.
func (s *PermitSemaphore) newPermit(parent context.Context, r *request, o lock.Options) *Permit {
	terms := watchdog.Terms{Sent: r.sent, TTL: r.grant.lease, MaxHold: o.MaxHold}
	if o.Lease == 0 {
		terms.Renewer = s.renewer
	}
	p := &permit{e: s, raw: r.grant.ids}
	id := ""
	if s.s.Telemetry != nil { // the text of an id allocates
		id = p.id()
	}

	p.Begin(s.s.Telemetry.StartHold(parent, s.id, lock.Owner{}, id, 0))
	p.Given(r.site)
	p.lease.Weight = uint16(min(len(p.raw), math.MaxUint16))
	s.permits.add(p)
	s.s.Watchdog.Watch(&p.lease, p, terms)
	result := &Permit{p: p}
	result.handle.Refer(p)
	return result
}

// id returns the first id.
func (p *permit) id() string { return hex.EncodeToString([]byte(p.raw[0])) }

// Name implements lock.Hold.
func (p *permit) Name() string { return p.e.id.Name }

// Object implements engine.Droppable.
func (p *permit) Object() wire.Object { return p.e.object() }

// Owner and Token complete lock.Hold.
func (p *permit) Owner() lock.Owner { return lock.Owner{} }
func (p *permit) Token() int64      { return 0 }

// Context implements lock.Hold.
func (p *permit) Context() context.Context { return p.ContextOf(p) }

// Conflicts implements engine.ContextHold. Whether an acquisition waits depends on all permits.
func (p *permit) Conflicts(engine.LockID, lock.Owner) bool { return false }

// Break implements engine.ContextHold.
func (p *permit) Break(reason lock.Reason) bool {
	p.lease.Check()
	if !p.Held() {
		return false
	}

	p.Lost(reason, nil)
	if p.Loss() == nil { // it was released meanwhile
		return false
	}

	p.free(context.Background())
	return true
}

// free releases a lost permit, which the server may still have.
func (p *permit) free(ctx context.Context) {
	_, _ = p.e.release(ctx, patience, p.asGrant(), true)
}

// asGrant returns the permit as what a release gives back.
func (p *permit) asGrant() grant { return grant{permits: len(p.raw), ids: p.raw} }

// Dropped implements engine.Droppable.
func (p *permit) Dropped() {
	p.Disown()
	if !p.lease.StopRenewing() {
		return
	}

	p.e.s.Go(func(context.Context) { // a logger may block
		p.e.s.LogDropped("redlatch: a permit was dropped without Release; it is no longer renewed",
			"name", text.Safe(p.e.id.Name), "kind", p.e.id.Kind, "permit", p.id(), "acquired", p.Site.String())
	})
}

// Leased implements watchdog.Holder.
func (p *permit) Leased() watchdog.Subject {
	return watchdog.Subject{Key: p.e.key, Owner: strings.Join(p.raw, "")}
}

// Lost implements watchdog.Holder. While releases by id are in progress, only their answers
// tell whether a permit that the server does not have is lost or released.
func (p *permit) Lost(reason lock.Reason, cause error) {
	if reason == lock.ReasonGone && p.releasing.Load() > 0 || !p.Lose(p.lostError(reason, cause)) {
		return
	}
	p.forget()
	p.EndSpan(p.e.s.Go)
}

// gone is called when the server does not have the permit.
func (p *permit) gone() {
	p.lease.Forget()
	p.Lost(lock.ReasonGone, nil)
}

// forget removes what this client keeps of a permit that has ended.
func (p *permit) forget() {
	p.lease.Forget()
	p.e.permits.remove(p)
}

// endRelease is called when a release by id, counted in releasing, has been answered.
func (p *permit) endRelease(released, gone bool) {
	p.releasing.Add(-1)
	if released {
		if p.End("release", p.Object()) == nil {
			p.forget()
			p.Span().End(nil)
		}
		return
	}

	p.lease.Check()
	if gone || p.lease.Remaining() == 0 { // or the watchdog has learned that it is gone
		p.gone()
	}
}

func (p *permit) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: p.e.id.Name, Permit: p.id(), Reason: reason, When: time.Now(), Err: cause}
}

// startChange begins a change of the lease, unless ctx ends before the changes of others do. It reports
// whether it did; endChange follows.
func (p *permit) startChange(ctx context.Context) bool {
	p.changing.once.Do(func() { p.changing.c = make(chan struct{}, 1) })
	select {
	case p.changing.c <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *permit) endChange() { <-p.changing.c }

// fix makes the lease end ttl after sent, and stops its renewal. Of several permits only one has
// that lease.
func (p *permit) fix(sent time.Time, ttl time.Duration) {
	if len(p.raw) > 1 {
		ttl = min(ttl, time.Since(sent)+p.lease.Remaining())
	}
	p.lease.Fix(sent, ttl)
}

// Remaining implements lock.Hold.
func (p *permit) Remaining() time.Duration {
	if !p.Held() { // the lease of a lost permit ends after its context
		return 0
	}
	left := p.lease.Remaining()
	if left > lock.MaxLease { // less is the rest of MaxHold
		return lock.NoExpiry
	}
	return left
}

// extend is the op of Extend.
const extend = "extend"

// Extend implements lock.Hold.
func (p *permit) Extend(ctx context.Context, lease time.Duration) error {
	p.lease.Check()
	if err := p.Err(extend, p.Object()); err != nil {
		return err
	}
	if _, err := p.e.changeLease(ctx, extend, p, p.raw, lease); err != nil {
		return err
	}
	return p.Err(extend, p.Object())
}

// Unlock implements lock.Hold.
func (p *permit) Unlock(ctx context.Context) error {
	return p.end(ctx, "release", func(ctx context.Context) (bool, error) {
		result, err := p.e.release(ctx, patience, p.asGrant(), true)
		return result == releaseDone, err
	})
}

// Detach implements lock.Hold.
func (p *permit) Detach(ctx context.Context, lease time.Duration) (id string, err error) {
	to := newIDs(len(p.raw))
	var over time.Time
	if left := p.Remaining(); left != lock.NoExpiry {
		over = time.Now().Add(left)
	}
	err = p.end(ctx, "detach", func(ctx context.Context) (bool, error) {
		moved, err := p.e.leave(ctx, p.raw, to, lease, over)
		if err == nil && !moved && len(p.raw) > 1 {
			p.e.s.Go(p.free) // what is left of them
		}
		return moved, err
	})
	if err != nil && !engine.GoesOn(err) {
		return "", err
	}

	return detachedID(to), err
}

// end ends the permit for op with a request, which reports whether the server had it.
func (p *permit) end(ctx context.Context, op string, request func(ctx context.Context) (bool, error)) error {
	if p.e.s.Stay() { // Close waits for the request
		defer p.e.s.Leave()
	}
	p.lease.Check()
	if err := p.End(op, p.Object()); err != nil {
		if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
			if lost.Reason == lock.ReasonMaxHold && p.e.s.Err() == nil { // the server has it for sure, and most likely answers
				p.free(context.WithoutCancel(ctx))
			} else {
				p.e.s.Go(p.free)
			}
		}
		return err
	}

	p.forget()
	ctx, released := p.StartRelease(ctx)
	began := time.Now()
	stood, err := request(ctx)
	if err == nil && !stood {
		err = p.lostError(lock.ReasonGone, nil)
	} else if wire.IsWrongType(err) {
		err = p.lostError(lock.ReasonGone, err) // the key is no longer this semaphore
	}
	return p.Released(released, p.e.failed(ctx, op, began, err))
}

// renewer renews permits. The Owner of a lease is the ids of all its permits, one after the other.
type renewer struct {
	engine.ScriptRenewer
	idle string // of the pool
}

// renewSize bounds the permits that one script renews, because it blocks the server.
const renewSize = 100

// Renew implements watchdog.Renewer.
func (r renewer) Renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, shared bool) []watchdog.Renewed {
	several := func(l watchdog.Subject) bool { return len(l.Owner) > idSize }
	if !slices.ContainsFunc(batches, func(batch []watchdog.Subject) bool { return slices.ContainsFunc(batch, several) }) {
		return r.send(ctx, batches, ttl, shared)
	}

	type place struct{ batch, lease int }
	var parts [][]watchdog.Subject // a lease for each permit
	var places [][]place           // where it comes from
	results := make([]watchdog.Renewed, len(batches))
	for b, batch := range batches {
		results[b] = watchdog.Renewed{Held: slices.Repeat([]bool{true}, len(batch)), Errs: make([]error, len(batch))}
		var permits []watchdog.Subject
		var of []place
		for i, l := range batch {
			for id := range slices.Chunk([]byte(l.Owner), idSize) {
				permits = append(permits, watchdog.Subject{Key: l.Key, Owner: string(id)})
				of = append(of, place{b, i})
			}
		}
		parts = slices.AppendSeq(parts, slices.Chunk(permits, renewSize))
		places = slices.AppendSeq(places, slices.Chunk(of, renewSize))
	}

	for n, renewed := range r.send(ctx, parts, ttl, shared) {
		for i, at := range places[n] {
			result := &results[at.batch]
			if err := renewed.ErrOf(i); err != nil {
				result.Errs[at.lease] = err
			} else if !renewed.Held[i] {
				result.Held[at.lease] = false
			}
		}
	}

	for _, result := range results {
		for i, held := range result.Held {
			if !held { // whatever has become of the others
				result.Errs[i] = nil
			}
		}
	}

	return results
}

// send renews batches of single permits.
func (r renewer) send(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, shared bool) []watchdog.Renewed {
	if r.idle == "" {
		return r.ScriptRenewer.Renew(ctx, batches, ttl, shared)
	}
	return r.RenewWith(ctx, batches, ttl, shared, keepingRenewScript, r.idle)
}

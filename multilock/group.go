package multilock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// group is the part that Multi and Red share.
type group struct {
	all  *Shared
	s    *session.Session // of the client
	info telemetry.Lock
	on   []engine.LockID // the locks that it consists of
	err  error           // of an invalid member

	reads bool // a member is a read lock
}

// newGroup returns a group of members with these names, which consists of those locks. err is the
// error of an invalid member.
func newGroup(all *Shared, kind string, names []string, on []engine.LockID, err error) group {
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%w: %s lock without members", lock.ErrInvalid, kind)
	}
	var unique []string
	for _, name := range names {
		if !slices.Contains(unique, name) { // members on several servers may share a name
			unique = append(unique, name)
		}
	}

	g := group{all: all, info: telemetry.Lock{Kind: kind, Name: strings.Join(unique, ",")}, on: on, err: err}
	if all != nil { // there is a member
		g.s = all.e.Session
	}

	return g
}

// find returns the lock that is member i of a group, or nil. It may also be one that no call can use, of
// which an error says why.
func find(kind string, i int, m lock.Locker) (*engine.Lock, error) {
	l := engine.Find(m)
	if l == nil {
		return nil, fmt.Errorf("%w: member %d of a %s lock is nil or of a wrong type: %T", lock.ErrInvalid, i+1, kind, m)
	}
	if err := l.Check(context.Background()); errors.Is(err, lock.ErrInvalid) {
		return l, err // of its name or an option
	}
	return l, nil
}

// check returns an error if an attempt under ctx is pointless.
func (g *group) check(ctx context.Context) error {
	if g.err != nil { // it may have no session
		return g.object().Refused("acquire", g.err)
	}
	if err := g.s.Check(ctx); err != nil || ctx.Err() == nil {
		return g.object().Refused("acquire", err)
	}
	return g.failed(ctx, "acquire", time.Now(), lock.ErrNotAcquired)
}

// object returns what errors name.
func (g *group) object() wire.Object { return wire.Object(g.info) }

// failed returns the error of a call for op that began then.
func (g *group) failed(ctx context.Context, op string, began time.Time, err error) error {
	return g.object().Failed(ctx, op, began, err)
}

// groupMember is the hold of a group, which may be the member of another group.
type groupMember interface {
	engine.Droppable
	KeepUntil(until time.Time)
}

// open is Lock, or TryLock if try is set, of the group g that acquire acquires.
func open[H groupMember, O lock.Option](ctx context.Context, g *group, opts []O, try bool,
	acquire func(ctx context.Context, o lock.Options, once bool) (H, error)) (lock.Hold, error) {
	o, err := engine.Resolve(g.reads, opts)
	if err != nil {
		return nil, g.object().Refused("acquire", err)
	}
	once := try || o.Bounded && o.Wait == 0
	if !once && g.check(ctx) == nil {
		g.all.e.WarnNested(ctx, g.info, g.on...)
	}
	h, err := acquire(ctx, o, once)
	if err != nil {
		return nil, err
	}
	h.KeepUntil(engine.KeptUntil(o))
	return engine.NewHandle(h), nil
}

// groupHold is the common part of the holds on a Multi and a Red.
type groupHold struct {
	engine.State
	group *group
	owner lock.Owner // that the caller named, or zero
	fixed bool       // not renewed

	keepUntil time.Time // see engine.AnyHold
}

// KeepUntil implements engine.AnyHold. It is called before the hold is shared.
func (h *groupHold) KeepUntil(until time.Time) { h.keepUntil = until }

// Detach implements lock.Hold.
func (h *groupHold) Detach(context.Context, time.Duration) (string, error) {
	return "", h.Object().Refused("detach", fmt.Errorf("%w: Detach of several locks", lock.ErrUnsupported))
}

// begin makes the hold of a call with ctx held.
func (h *groupHold) begin(ctx context.Context, o lock.Options) {
	h.Begin(h.group.s.Telemetry.StartHold(engine.HoldParent(ctx, o), h.group.info, h.owner, "", 0))
	h.Given(callsite.Of(o.Site))
}

func (h *groupHold) loss(reason lock.Reason, cause error) *lock.LostError {
	if reason == lock.ReasonGone && h.group.s.Err() != nil {
		reason = lock.ReasonClosed // the members are gone because their client is closing
	}
	return &lock.LostError{Name: h.Name(), Owner: h.owner, Reason: reason, When: time.Now(), Err: cause}
}

// lose marks the hold as lost. It reports whether the hold was held.
func (h *groupHold) lose(reason lock.Reason, cause error) bool {
	lost := h.Lose(h.loss(reason, cause))
	if lost {
		h.EndSpan(h.background)
	}
	return lost
}

// background calls f on its own goroutine, even while the client is closing.
func (h *groupHold) background(f func(ctx context.Context)) bool {
	if !h.group.s.Go(f) {
		go f(context.Background())
	}
	return true
}

// dropped logs that the handle of a renewed hold was collected.
func (h *groupHold) dropped() {
	h.Disown()
	if h.fixed {
		return
	}

	h.background(func(context.Context) { // a logger may block
		h.group.s.LogDropped("redlatch: a hold was dropped without Unlock; it is no longer renewed",
			"name", text.Safe(h.Name()), "kind", h.group.info.Kind, "acquired", h.Site.String())
	})
}

// described returns the names of the hold, for a list.
func (h *groupHold) described() session.Hold {
	return session.Hold{Kind: h.group.info.Kind, Name: h.group.info.Name, Owner: h.owner.String()}
}

// Conflicts implements engine.ContextHold.
func (h *groupHold) Conflicts(with engine.LockID, owner lock.Owner) bool {
	return (owner.IsZero() || owner != h.owner) && slices.Contains(h.group.on, with) && h.Held()
}

// Name implements lock.Hold.
func (h *groupHold) Name() string { return h.group.info.Name }

// Object implements engine.Droppable.
func (h *groupHold) Object() wire.Object { return h.group.object() }

// Owner implements lock.Hold.
func (h *groupHold) Owner() lock.Owner { return h.owner }

// Token implements lock.Hold.
func (h *groupHold) Token() int64 { return 0 }

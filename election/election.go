// Package election implements leader election: of several candidates one leads at a time, with a
// fencing token that grows from term to term.
//
//	e := client.Election("scheduler")
//	err := e.Run(ctx, "host-7:8080", func(ctx context.Context, term *election.Term) error {
//		return schedule(ctx, term.Token())
//	})
//
// and in any process:
//
//	for leader, err := range e.Observe(ctx) {
//		...
//	}
//
// # Terms
//
// The candidates of all processes wait for a fair lock with the name of the election, so they lead
// in the order in which they came. A term is a hold on that lock, and keeps its promises: the term
// ends, and its context with it, when the lease is over by the leader's own monotonic clock, before
// another candidate can begin one. So a leader that loses its connection stops leading while the
// others still wait. After the death of a leader the next term begins when the lease is over, 30 s
// later by default (see redlatch.WithWatchdogTimeout).
//
// The fair lock has the same name. Client.FairLock(name).Queue lists the candidates that wait.
// Its ForceUnlock deposes the leader, whose term ends at the next renewal, after a third of the lease at
// most. While somebody else holds that lock, nobody leads.
//
// # Tokens
//
// A lease is no proof: a process can be paused after it has checked its term and before it acts on
// it. Where that matters, pass the token of the term along with each write, and let the resource
// reject a token lower than the highest it has seen. The server counts the tokens in a key that
// never expires. If it loses its data, they begin again at 1.
package election

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"slices"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	beginScript  = engine.LoadScript(luaFiles, "begin")
	leaderScript = wire.LoadScript(luaFiles, "leader")
)

// ErrNoLeader is returned by Leader if there is no leader.
var ErrNoLeader = errors.New("redlatch: no leader")

// Election is a leader election. Client.Election returns it. It is immutable and safe for
// concurrent use.
type Election struct {
	s         *session.Session
	candidacy lock.Locker // what the leader holds
	key       string
	err       error // the name is invalid
}

// New returns the election of that name. Client.Election calls it.
func New(eng *engine.Engine, name string) *Election {
	e := &Election{s: eng.Session, candidacy: fairlock.NewCandidacy(eng, name)}
	e.key, e.err = e.s.Key(name, e.s.CheckName)
	return e
}

// Name returns the name that was passed to the client.
func (e *Election) Name() string { return e.candidacy.Name() }

// Term is the time for which a candidate leads. End it with Resign. Its methods are safe for
// concurrent use. A term with a renewed lease that becomes unreachable ends like a hold on a lock.
type Term struct {
	hold  lock.Hold
	value string
	token int64
}

// Context returns the context of the term, a child of the context of Campaign or lock.Parent. It ends with
// the term; context.Cause then returns what lock.Hold says for a hold: a *lock.LostError if
// the term was lost, and context.Canceled after Resign.
func (t *Term) Context() context.Context { return t.hold.Context() }

// Token returns the fencing token of the term: at least 1, and higher than the token of any earlier term.
func (t *Term) Token() int64 { return t.token }

// Value returns the value that was passed to Campaign.
func (t *Term) Value() string { return t.value }

// Owner returns the id of the term on the server, which no other term has.
func (t *Term) Owner() lock.Owner { return lock.OwnerOf(t.hold) }

// Remaining returns the time for which it is certain, by the local monotonic clock, that nobody else
// leads, and 0 once the term has ended.
func (t *Term) Remaining() time.Duration { return t.hold.Remaining() }

// Extend extends the term to at least lease from now. It is for terms with lock.Lease, which are not
// renewed. It blocks for one round trip and returns the errors of Hold.Extend.
func (t *Term) Extend(ctx context.Context, lease time.Duration) error {
	return t.hold.Extend(ctx, lease)
}

// Resign ends the term, so that the next candidate leads. It blocks, and returns the errors, of
// Hold.Unlock: lock.ErrNotHeld after an earlier Resign, and a *lock.LostError if the term was lost.
func (t *Term) Resign(ctx context.Context) error { return t.hold.Unlock(ctx) }

// Leader describes a term as other processes see it.
type Leader struct {
	Value string
	Token int64
	Owner lock.Owner
}

// Campaign becomes a candidate, and returns a term when the candidate leads. It blocks until then,
// or until ctx ends or lock.Wait runs out. Observers read value, for example an address; it may be
// empty.
//
// It has the options and errors of Locker.Lock. With lock.AtLeast nobody leads between an early Resign
// and the end of that time. After an error that matches lock.ErrIndeterminate the candidate leaves the
// server at the end of a lease at the latest, and after any other it has left. If the lock is lost
// before the term begins, the error matches lock.ErrNotAcquired. An owner named by lock.WithOwner that
// already leads gets one that matches lock.ErrReentered.
func (e *Election) Campaign(ctx context.Context, value string, opts ...lock.Option) (*Term, error) {
	settings, err := lock.Resolve(opts...)
	if err != nil {
		return nil, e.object().Refused("campaign", err)
	}

	began := time.Now()

	// The least time applies to a term, and a candidate whose term does not begin leaves at once.
	hold, err := e.candidacy.Lock(ctx, append(slices.Clip(opts), lock.AtLeast(0))...)
	if err != nil {
		return nil, err
	}

	token, err := e.begin(ctx, hold, value)
	if err != nil {
		return nil, e.withdraw(ctx, hold, began, err)
	}

	engine.KeepUntil(hold, engine.KeptUntil(settings))
	e.s.Telemetry.SetToken(hold.Context(), token)
	return &Term{hold, value, token}, nil
}

// begin begins a term on the server and returns its token. It is repeated until the lease is over.
func (e *Election) begin(ctx context.Context, hold lock.Hold, value string) (token int64, err error) {
	if !e.s.Stay() {
		return 0, lock.ErrClosed
	}
	defer e.s.Leave()

	args := []string{lock.OwnerOf(hold).String(), value, e.s.Publish, wire.ElectionChannel(e.key)}
	err = e.s.Retry(ctx, time.Now().Add(hold.Remaining()), func(ctx context.Context) (err error) {
		token, err = wire.Number(beginScript.Exec(ctx, e.s.Client, e.keys(), args), wire.Tokens)
		return err
	}, wire.IsRefused)
	if err == nil && token == 0 {
		err = lock.ErrNotAcquired // the lock is gone
	}
	return token, err
}

// withdraw releases the lock of a candidate whose term could not begin because of err. It returns the
// error of Campaign.
func (e *Election) withdraw(ctx context.Context, hold lock.Hold, began time.Time, err error) error {
	undone := e.s.Undo(ctx, engine.UnlockTimeout, func() error { return hold.Unlock(ctx) })
	kind := undone
	switch {
	case undone != nil && !errors.Is(undone, lock.ErrLost):
	case ctx.Err() != nil, errors.Is(err, lock.ErrNotAcquired):
		kind = lock.ErrNotAcquired
	case wire.IsRefused(err):
		kind = nil
	default:
		kind = lock.ErrUnavailable
	}

	return e.object().Failed(ctx, "campaign", began, errors.Join(kind, err))
}

// Leader returns the current leader. If there is none, the error matches ErrNoLeader. It blocks for
// one round trip. Other errors are lock.ErrUnavailable, lock.ErrClosed and refusals of the server.
//
// The answer can be outdated when it arrives, also because a leader that is cut off stays the leader
// until its lease is over. It cannot replace a token.
func (e *Election) Leader(ctx context.Context) (Leader, error) {
	if err := e.check(ctx); err != nil {
		return Leader{}, e.object().Refused("read", err)
	}

	began := time.Now()
	leader, err := e.read(ctx)
	if err == ErrNoLeader {
		return Leader{}, e.object().Refused("read", err)
	}

	return leader, e.object().ReadFailed(ctx, "read", began, err)
}

// read reads the current leader. The error is ErrNoLeader if there is none.
func (e *Election) read(ctx context.Context) (Leader, error) {
	term, err := leaderScript.Exec(ctx, e.s.Client, e.keys(), nil).AsStrSlice()
	if rueidis.IsRedisNil(err) {
		return Leader{}, ErrNoLeader
	}
	if err != nil {
		return Leader{}, err
	}

	return parseTerm(term)
}

// object returns what errors name.
func (e *Election) object() wire.Object { return wire.Object{Kind: "election", Name: e.Name()} }

// keys returns the keys of both scripts.
func (e *Election) keys() []string { return []string{e.key, wire.ElectionTerm(e.key)} }

// check returns an error if no operation on the election can succeed.
func (e *Election) check(ctx context.Context) error { return cmp.Or(e.err, e.s.Check(ctx)) }

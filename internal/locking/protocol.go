// Package locking is what the kinds of lock share: how an acquisition is made,
// held, lost and given back. A kind brings its scripts as a [Protocol] and says
// nothing about when they are called.
package locking

import (
	"cmp"
	"context"
	_ "embed"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Claim is an acquisition as the server sees it.
type Claim struct {
	Key   string
	Kind  string // of lock, where those of several stand in one queue
	Owner lock.Owner
	Lease time.Duration
	// Ticket is the request id of a claim whose owner was named by the caller
	// and may hold more than once, in more than one process: it makes each of
	// its requests take effect once, and on this hold alone. It is empty for an
	// owner made for this claim alone, whose requests can be repeated as they are.
	Ticket string
	// AnyHold is set for a release that is not of a hold of its own but of
	// whichever the owner has. Its Ticket was made for it.
	AnyHold bool
	// Waits is set for an acquisition that goes on trying, and may take a place
	// on the server meanwhile.
	Waits bool
	// Single is set if what the server stores is of one claim, not of an owner. Its
	// Ticket is a part of that then, and no key.
	Single bool
	// LeftOpen is set for a release after which who hears of it stays away for a
	// while, for the sake of those who do not.
	LeftOpen bool
}

// Named reports whether the caller named the owner.
func (c *Claim) Named() bool { return c.Ticket != "" }

// Holder is what the server has for the claim while it holds.
func (c *Claim) Holder() string {
	if c.Single && c.Named() {
		return c.Owner.String() + ":" + c.Ticket
	}
	return c.Owner.String()
}

// latch is the key of the claim's ticket, or "" if it has none.
func (c *Claim) latch() string {
	if !c.Named() || c.Single {
		return ""
	}
	return wire.UnlockLatch(c.Key, c.Ticket)
}

// Keys are those of a script about the claim: the given ones, and behind them that
// of its ticket if it has one.
func (c *Claim) Keys(keys ...string) []string {
	if latch := c.latch(); latch != "" {
		keys = append(keys, latch)
	}
	return keys
}

// LatchLife is for how long the result of a release is kept for its repetitions:
// longer than they go on.
const LatchLife = 16 * time.Second

// ReleaseArgs are what a script that gives back a hold by its ticket has last: for
// how long the ticket is kept, and which hold it is to end.
func (c *Claim) ReleaseArgs(undo bool) []string {
	which := "hold"
	switch {
	case c.AnyHold:
		which = "any"
	case undo:
		which = "undo"
	}
	return []string{wire.Millis(LatchLife), which}
}

// Answer is what the server says to an acquisition or a hand-off.
type Answer struct {
	Acquired  bool
	Token     int64         // of a fenced kind
	FreeIn    time.Duration // if not acquired; less than 0 if unknown
	Reentered bool          // refused because the owner holds it and must not again
	Upgrade   bool          // refused because the owner is a reader and would wait for itself
	// Placed is set if the claim has a place on the server now, to be given up
	// with Leave; Moved, if that is behind all others, as after its first attempt.
	Placed, Moved bool
}

// Passed is what became of a hand-off.
type Passed struct {
	// Answer is for every claim it was for. If it is not acquired, and Released
	// says that the hold was not there, nothing was done.
	Answer
	// Released is what was done instead.
	Released
}

// Released is what a release found.
type Released struct {
	State ReleaseState
	// Told is how many subscribers were told that the lock is free, less than 0
	// if that is not known.
	Told int
}

// ReleaseState is what became of the lock.
type ReleaseState int

// What a release found.
const (
	NotHeld   ReleaseState = iota // the owner had no hold
	StillHeld                     // one of several holds is gone
	Free                          // the lock is free, and waiters were told
	Shared                        // the owner, though not named, holds more than once: nothing was done
)

// The replies of release scripts.
const (
	replyShared    = -1
	replyNotHeld   = 0
	replyStillHeld = 1
	replyFree      = 2 // and more: the number of subscribers told
)

// ReleaseReply returns what the reply of a release script means. With uncounted set
// it does not know all who were told.
func ReleaseReply(n int64, uncounted bool) Released {
	switch {
	case n == replyShared:
		return Released{State: Shared}
	case n == replyNotHeld:
		return Released{State: NotHeld}
	case n == replyStillHeld:
		return Released{State: StillHeld}
	case uncounted:
		return Released{State: Free, Told: -1}
	default:
		return Released{State: Free, Told: int(n - replyFree)}
	}
}

// Traits are what the acquire loop has to know of a kind of lock.
type Traits struct {
	Kind  string // its name in logs and telemetry
	Queue string // kinds with the same one wait in the same queue of a process
	// Eager is set if an attempt is of use although this process has a hold, and
	// Shared if others may get in beside a hold of this kind.
	Eager, Shared bool
	// Group is set if waiters that stand behind one another try together.
	Group bool
	// Ordered is set if the server keeps all waiters in order, so that each has to
	// make an attempt when it comes.
	Ordered bool
	// Batch is set if one script can take, or release, several locks of this kind.
	Batch bool
	// Relayed is set if a claim can be passed on inside the process as it is: nothing
	// that the server stores or counts is of one acquisition alone.
	Relayed bool
	// Single is set if the server stores one claim and no owners: see Claim.
	Single bool
	// Polled is set if others release without a message and wait without hearing
	// any: waiters try again after a Backoff, too, and the lock is left open to
	// others from time to time.
	Polled bool
}

// Protocol is what a kind of lock says to the server. Its methods block for one
// round trip. An error that is a reply of the server says that nothing was done.
type Protocol interface {
	Traits() Traits
	// Channel is where the claim is told of a release, or "".
	Channel(c *Claim) string
	// Backoff is the pause after the n-th attempt where there is no channel, or
	// Traits say Polled.
	Backoff(n int) time.Duration
	// Acquire makes one attempt.
	Acquire(ctx context.Context, c *Claim) (Answer, error)
	// HandOff passes a hold on from one unnamed claim to others, if from holds it,
	// once. They are unnamed, and several only if Group is set.
	HandOff(ctx context.Context, from *Claim, to []*Claim) (Passed, error)
	// Release gives one hold back, or a place. With undo set it is for a claim
	// whose acquisition has an unknown outcome, and does nothing unless that
	// request has run.
	Release(ctx context.Context, c *Claim, undo bool) (Released, error)
	// Extend gives the hold at least lease from now and reports whether the
	// owner has it.
	Extend(ctx context.Context, c *Claim, lease time.Duration) (bool, error)
	// Renewer renews leases of this kind. It is comparable.
	Renewer() watchdog.Renewer
}

// Grouped is a Protocol that can make one attempt for several claims: one whose
// Traits say Group or Ordered.
type Grouped interface {
	// AcquireAll makes one attempt for unnamed claims that all wait, in their
	// order, and returns an answer for each. An error is about all of them.
	AcquireAll(ctx context.Context, claims []*Claim) ([]Answer, error)
}

// Batched is a Protocol whose Traits say Batch.
type Batched interface {
	// AcquireEach takes the locks of unnamed claims, in their order, up to the first
	// that somebody else has, or with all set none if there is one. It returns an
	// answer for each.
	AcquireEach(ctx context.Context, claims []*Claim, all bool) ([]Answer, error)
	// ReleaseEach is Release for several unnamed claims. Shared says that one has to be
	// released by itself, for whatever reason.
	ReleaseEach(ctx context.Context, claims []*Claim) ([]Released, error)
}

// Renamer is a Protocol whose Traits say Ordered.
type Renamer interface {
	// Rename puts the hold of one unnamed claim under the owner of another, if from
	// has it, once, and reports whether to has it now. It can be repeated.
	Rename(ctx context.Context, from, to *Claim) (bool, error)
}

// Placed is a Protocol whose waiters have a place on the server.
type Placed interface {
	// Leave gives up the place of a claim that does not wait any more. It can be
	// repeated.
	Leave(ctx context.Context, c *Claim) error
	// PlaceKeeper keeps the places of live waiters, and PlaceTime is for how long
	// after its last sign of life a place is kept. Nil if they keep themselves, by
	// attempts.
	PlaceKeeper() watchdog.Renewer
	PlaceTime() time.Duration
}

var (
	//go:embed renew.lua
	renewLua string
	// ExtendLua extends a hold of a lock that is a hash with one field per owner.
	//
	//go:embed extend.lua
	ExtendLua string

	hashRenew = wire.NewScript(renewLua)
)

// HashRenewer renews the locks that are a hash with one field per owner.
type HashRenewer struct {
	Client rueidis.Client
	Suffix string // what a field has behind the owner
}

// hashRenewers are those of a client.
type hashRenewers struct {
	once  sync.Once
	plain watchdog.Renewer
}

// Renewer returns the HashRenewer without a suffix, which is the same for all locks of
// a client.
func Renewer(s *session.Session) watchdog.Renewer {
	r := session.Of[hashRenewers](s)
	r.once.Do(func() { r.plain = HashRenewer{Client: s.Client} })
	return r.plain
}

// Renew implements watchdog.Renewer.
func (r HashRenewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, detour bool) []watchdog.Renewed {
	return RenewBatches(ctx, r.Client, hashRenew, batches, ttl, detour, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner+r.Suffix)
	})
}

// RenewBatches runs a script with the interface of renew.lua for every batch. about
// appends what the script is to know of a lease, before which of its keys is the
// ticket.
func RenewBatches(ctx context.Context, c rueidis.Client, script *wire.Script, batches [][]*watchdog.Lease, ttl time.Duration, detour bool,
	about func(args []string, l *watchdog.Lease) []string) []watchdog.Renewed {
	r := renewal{c, script, ttl, about}
	return RenewApart(batches, detour, func(batches [][]*watchdog.Lease, apart bool) []watchdog.Renewed {
		return r.run(ctx, batches, apart)
	})
}

// RenewApart calls renew for the batches, and for the leases of one again, each by
// itself, if its slot is being moved and has keys on either side. With apart set
// renew uses connections that no other command delays; a detour is the connection
// of all other commands.
func RenewApart(batches [][]*watchdog.Lease, detour bool, renew func(batches [][]*watchdog.Lease, apart bool) []watchdog.Renewed) []watchdog.Renewed {
	results := renew(batches, !detour)
	for b, batch := range batches {
		if reply, ok := rueidis.IsRedisErr(results[b].Err); ok && reply.IsTryAgain() && len(batch) > 1 {
			results[b] = watchdog.Renewed{}
			for _, one := range renew(slices.Collect(slices.Chunk(batch, 1)), false) {
				results[b].Held = append(results[b].Held, one.Err == nil && one.Held[0])
				results[b].Err = cmp.Or(results[b].Err, one.Err)
			}
		}
	}
	return results
}

// renewal is what the requests of RenewBatches have in common.
type renewal struct {
	client rueidis.Client
	script *wire.Script
	ttl    time.Duration
	about  func(args []string, l *watchdog.Lease) []string
}

func (r renewal) run(ctx context.Context, batches [][]*watchdog.Lease, apart bool) []watchdog.Renewed {
	calls := make([]wire.Call, len(batches))
	for b, batch := range batches {
		keys, args := make([]string, len(batch)), make([]string, 1, 1+3*len(batch))
		args[0] = wire.Millis(r.ttl)
		for i, l := range batch {
			keys[i] = l.Key
			ticket := 0
			if l.Ticket != "" {
				keys = append(keys, l.Ticket)
				ticket = len(keys)
			}
			args = append(r.about(args, l), strconv.Itoa(ticket))
		}
		calls[b] = wire.Call{Keys: keys, Args: args}
	}
	results := make([]watchdog.Renewed, len(batches))
	for b, reply := range r.script.ExecMany(ctx, r.client, calls, apart) {
		held, err := wire.Numbers(reply, len(batches[b]))
		results[b].Err = err
		for _, n := range held {
			results[b].Held = append(results[b].Held, n == 1)
		}
	}
	return results
}

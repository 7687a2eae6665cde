// Package locking is what the kinds of lock share: how a claim is requested, held, passed
// on within the process, lost and given back. A kind brings its scripts as a [Protocol] and
// says nothing about when they are called.
package locking

import (
	"context"
	"embed"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Claim is an acquisition as the server sees it. Requests for it can be repeated: no other
// claim has its id.
type Claim struct {
	Key   string
	ID    lock.Owner
	Lease time.Duration
	// Waits is set for an acquisition that goes on trying, and may take a queue position
	// on the server meanwhile.
	Waits bool
	// LeftOpen is set for a release after which waiters that hear of it stay away for a
	// while, for the sake of those that do not.
	LeftOpen bool

	// Writer is the id of the write claim beside which a read claim of the same owner is
	// requested, or zero.
	Writer lock.Owner
	// Passed is as in Question, for a release.
	Passed []lock.Owner

	waited     bool // an attempt did not succeed
	mayHaveRun bool // an attempt with this id has an unknown outcome, and the id was kept
	attempts   int32
}

// Answer is what the server says to an acquisition.
type Answer struct {
	Acquired bool
	Token    int64         // of a fenced kind
	FreeIn   time.Duration // if not acquired; less than 0 if unknown
	NoExpiry bool          // if not acquired: the key is known to have no expiry
	// Queued is set if the claim has a queue position on the server now, which Leave
	// removes. Moved is set if that is behind all others, as after the first attempt.
	Queued, Moved bool
}

// Several is what the server says to an acquisition of several locks.
type Several struct {
	Acquired int // how many, from the first on
	// Unless all are acquired: what Answer has, and the index, of the first lock that is held.
	FreeIn   time.Duration
	InTheWay int
}

// Freeing is a claim that is to be released, with the channel of its lock.
type Freeing struct {
	*Claim
	Channel string
}

// Question asks whether a claim stands that is passed on within the process.
type Question struct {
	// Passed are the waiters that have had it since the last question. They leave the
	// server's queue.
	Passed []lock.Owner
	// Next are the waiters of this process, in order.
	Next []lock.Owner
	// Tokens is the number of fencing tokens that earlier answers have brought, and that no
	// waiter has used.
	Tokens int
}

// Confirmation is the answer to a Question.
type Confirmation struct {
	Stands bool
	// Ready is the number of the next waiters, from the first on, that are next in the queue
	// of the server.
	Ready int
	// Tokens is the number of fencing tokens drawn, from Token on.
	Tokens int
	Token  int64
}

// Released is what a release found.
type Released struct {
	State ReleaseState
	// Receivers is the number of subscribers that received the message, negative
	// if that is not known.
	Receivers int
}

// ReleaseState is what became of the lock, and the reply of release scripts: Free, and more by
// the number of receivers.
type ReleaseState int64

// What a release found.
const (
	Unreleased ReleaseState = iota - 1 // the key is of another type
	NotHeld                            // the claim was not there
	StillHeld                          // others hold the lock too
	Free                               // the lock is free, and that was published
)

// Releases is the range of replies of scripts that release one claim.
var Releases = wire.Range{Least: int64(NotHeld), Most: math.MaxInt32}

// ReleaseReply decodes the reply of such a script. With uncounted set the number of receivers
// is not complete.
func ReleaseReply(reply rueidis.RedisResult, uncounted bool) (Released, error) {
	n, err := wire.Number(reply, Releases)
	return ReleasedBy(n, uncounted), err
}

// ReleasedBy is ReleaseReply of a number.
func ReleasedBy(n int64, uncounted bool) Released {
	switch state := ReleaseState(n); {
	case state < Free:
		return Released{State: state}
	case uncounted:
		return Released{State: Free, Receivers: -1}
	default:
		return Released{State: Free, Receivers: int(state - Free)}
	}
}

// Transferred is what a transfer found, and the reply of its scripts.
type Transferred int64

// What a transfer found.
const (
	NeitherStands Transferred = iota
	Moved
	WasThere // an earlier request has moved it
)

// TransferReply decodes the reply of a transfer.
func TransferReply(reply rueidis.RedisResult) (Transferred, error) {
	n, err := wire.Number(reply, wire.Range{Least: int64(NeitherStands), Most: int64(WasThere)})
	return Transferred(n), err
}

// Traits describe a kind of lock.
type Traits struct {
	acquire.Policy
	Kind  string // its name in logs and telemetry
	Queue string // kinds with the same one wait in the same queue of a process
	// Batch is set if one script can take, or release, several locks of this kind.
	Batch bool
	// Cohorts is set if a claim can be passed on within the process.
	Cohorts bool
	// NonReentrant is set if an owner that holds the lock gets an error instead of another
	// hold.
	NonReentrant bool
	// NoOwnerUnlock is set if a hold ends by its own Unlock only: the kind has no UnlockOwner.
	NoOwnerUnlock bool
}

// Protocol is what a kind of lock says to the server. Its methods block for one
// round trip. An error that is a reply of the server says that nothing was done.
type Protocol interface {
	Traits() Traits
	// Channel returns the channel of releases for the claim, or "". An Ordered kind has one for
	// each claim: this, a colon and the id.
	Channel(c *Claim) string
	// Acquire makes one attempt.
	Acquire(ctx context.Context, c *Claim) (Answer, error)
	// Release gives the claim back, or its queue position.
	Release(ctx context.Context, c *Claim) (Released, error)
	// Extend gives the claim at least lease from now and reports whether it stands.
	Extend(ctx context.Context, c *Claim, lease time.Duration) (bool, error)
	// Transfer makes the claim that of another id, with exactly that lease from now. Waiters learn
	// the new expiry. A repetition changes nothing.
	Transfer(ctx context.Context, c *Claim, to lock.Owner, lease time.Duration) (Transferred, error)
	// Renewer renews leases of this kind. It is comparable.
	Renewer() watchdog.Renewer
}

// Grouped is a Protocol that can make one attempt for several claims: its Traits say
// Group.
type Grouped interface {
	// AcquireAll makes one attempt for claims that all wait, in their
	// order, and returns an answer for each. An error is about all of them.
	AcquireAll(ctx context.Context, claims []*Claim) ([]Answer, error)
}

// AcquireOne is Acquire of a Grouped protocol.
func AcquireOne(ctx context.Context, p Grouped, c *Claim) (Answer, error) {
	answers, err := p.AcquireAll(ctx, []*Claim{c})
	if err != nil {
		return Answer{}, err
	}
	return answers[0], nil
}

// Batched is a Protocol whose Traits say Batch.
type Batched interface {
	// AcquireEach takes the locks of claims, in their order, up to the first
	// that somebody else has, or with all set none if there is one.
	AcquireEach(ctx context.Context, claims []*Claim, all bool) (Several, error)
	// ReleaseEach is Release for several claims. The state of one that has to be released by
	// itself is Unreleased.
	ReleaseEach(ctx context.Context, claims []Freeing) ([]Released, error)
}

// Prepared is a Protocol whose claims can be passed on only to waiters that a Question has
// named before.
type Prepared interface {
	// Confirm gives the claim at least its lease from now. It can be repeated.
	Confirm(ctx context.Context, c *Claim, q Question) (Confirmation, error)
}

// Positioned is a Protocol whose waiters have queue positions on the server.
type Positioned interface {
	// Leave removes the queue position of a claim that no longer waits. It can be
	// repeated.
	Leave(ctx context.Context, c *Claim) error
	// HeartbeatRenewer sends the heartbeats of waiters. It returns nil if attempts serve
	// as heartbeats.
	HeartbeatRenewer() watchdog.Renewer
	// PositionTTL returns how long a heartbeat keeps a position.
	PositionTTL() time.Duration
}

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	// ExtendScript extends a claim to a lock that is a hash with a field per claim.
	ExtendScript = wire.LoadScript(luaFiles, "extend")
	// HashRenewScript renews such claims.
	HashRenewScript = wire.LoadScript(luaFiles, "renew")
)

// shared are the files of functions for the scripts of several packages.
var shared = []string{"tokens", "kinds"}

// LoadScript is wire.LoadScript for a script that uses shared functions.
func LoadScript(files embed.FS, names ...string) *wire.Script {
	return wire.NewScript(WithShared(wire.Source(files, names...)))
}

// WithShared returns the source of a script, after the shared files that it uses.
func WithShared(source string) string {
	for _, name := range shared {
		if strings.Contains(source, name+".") {
			source = wire.Source(luaFiles, name) + source
		}
	}
	return source
}

// ScriptRenewer renews claims with a script like renew.lua.
type ScriptRenewer struct {
	Client    rueidis.Client
	Script    *wire.Script
	Suffix    string // what the script gets behind each owner
	ReadHolds bool   // the script also gets the key of each read hold
}

// hashRenewers are those of a client.
type hashRenewers struct {
	once  sync.Once
	plain watchdog.Renewer
}

// Renewer returns the renewer of locks that are a hash with a field for each owner. It is the
// same for all locks of a client.
func Renewer(s *session.Session) watchdog.Renewer {
	r := session.Of[hashRenewers](s)
	r.once.Do(func() { r.plain = ScriptRenewer{Client: s.Client, Script: HashRenewScript} })
	return r.plain
}

// Renew implements watchdog.Renewer. If the slot of a batch is being moved and has keys on
// either side, its leases are renewed again, each by itself.
func (r ScriptRenewer) Renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, shared bool) []watchdog.Renewed {
	results := r.renew(ctx, batches, ttl, !shared)
	for b, batch := range batches {
		if len(batch) == 1 || !wire.IsMoving(results[b].Err) {
			continue
		}
		results[b] = watchdog.Renewed{}
		for _, one := range r.renew(ctx, slices.Collect(slices.Chunk(batch, 1)), ttl, false) {
			results[b].Held = append(results[b].Held, one.Err == nil && one.Held[0])
			results[b].Errs = append(results[b].Errs, one.Err)
		}
	}
	return results
}

// renew sends one script for each batch. With dedicated set it uses connections that other
// commands cannot delay; otherwise the connection of all other commands.
func (r ScriptRenewer) renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, dedicated bool,
) []watchdog.Renewed {
	calls := make([]wire.Call, len(batches))
	for b, batch := range batches {
		keys, args := make([]string, 0, len(batch)), make([]string, 1, 1+len(batch))
		args[0] = wire.Millis(ttl)
		for _, l := range batch {
			keys, args = append(keys, l.Key), append(args, l.Owner+r.Suffix)
			if r.ReadHolds {
				keys = append(keys, wire.ReadHoldTimeout(l.Key, l.Owner, 1))
			}
		}
		calls[b] = wire.Call{Keys: keys, Args: args}
	}
	results := make([]watchdog.Renewed, len(batches))
	for b, reply := range r.Script.ExecMany(ctx, r.Client, calls, dedicated) {
		held, err := wire.Numbers(reply, len(batches[b]), wire.Flags)
		results[b].Err = err
		for _, n := range held {
			results[b].Held = append(results[b].Held, n == 1)
		}
	}
	return results
}

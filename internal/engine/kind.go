package engine

import (
	"context"
	"embed"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/redis/rueidis"

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
	// Passed is as in OwnershipCheck, for a release.
	Passed []lock.Owner
}

// Answer is the server's answer to an attempt to acquire a lock or permits.
type Answer struct {
	Acquired bool
	Token    int64 // of a fenced kind, if acquired

	// The rest is for an attempt that has not acquired. FreeIn is the time after which another one may
	// succeed, negative if only a message can tell. NoExpiry is set if the key is known to have none.
	FreeIn   time.Duration
	NoExpiry bool
	// Queued is set if the claim has a queue position on the server, which Leave removes. Requeued is
	// set if that is behind all others of this process, as after the first attempt.
	Queued, Requeued bool
	// Err is why an attempt for several waiters has no answer for this one.
	Err error

	unsent bool          // the wait was over before the attempt was sent
	poll   time.Duration // pause before the next attempt where some release without a message; 0: none
}

// MultiAnswer is the server's answer to an attempt to acquire several locks.
type MultiAnswer struct {
	Acquired int // how many, from the first on
	// Unless all are acquired: the FreeIn of the first lock that is held, and its index.
	FreeIn        time.Duration
	FirstConflict int
}

// PendingRelease is a claim that is to be released, with the channel of its lock.
type PendingRelease struct {
	*Claim
	Channel string
}

// OwnershipCheck asks whether the server still has a claim that is passed on within the process.
type OwnershipCheck struct {
	// Passed are the waiters that have had it since the last check. They leave the server's queue.
	Passed []lock.Owner
	// Next are the waiters of this process, in order.
	Next []lock.Owner
	// Tokens is the number of fencing tokens that earlier checks have brought, and that no waiter has used.
	Tokens int
}

// OwnershipResult is the result of an OwnershipCheck.
type OwnershipResult struct {
	Held bool
	// Ready is the number of the next waiters, from the first on, that are next in the queue of the server.
	Ready int
	// Tokens is the number of fencing tokens drawn, from Token on.
	Tokens int
	Token  int64
}

// Release is what a release found, or the end of a hold that was lost.
type Release struct {
	State ReleaseState
	// Receivers is the number of subscribers, of all processes, that received the message, negative if
	// that is not known.
	Receivers int

	elsewhere bool // a waiter of another process comes next
	leftOpen  bool // the key was left open to pollers
}

// ReleaseState is what became of the lock. A release script replies with it, and adds the number of receivers to
// Free.
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
func ReleaseReply(reply rueidis.RedisResult, uncounted bool) (Release, error) {
	n, err := wire.Number(reply, Releases)
	return ReleasedBy(n, uncounted), err
}

// ReleasedBy is ReleaseReply of a number.
func ReleasedBy(n int64, uncounted bool) Release {
	state := ReleaseState(n)
	if state < Free {
		return Release{State: state}
	}
	if uncounted {
		return Release{State: Free, Receivers: -1}
	}
	return Release{State: Free, Receivers: int(state - Free)}
}

// Transferred is what a transfer found, and the reply of its scripts.
type Transferred int64

// What a transfer found.
const (
	Missing Transferred = iota
	Moved
	MovedBefore // an earlier request has moved it
)

// TransferReply decodes the reply of a transfer.
func TransferReply(reply rueidis.RedisResult) (Transferred, error) {
	n, err := wire.Number(reply, wire.Range{Least: int64(Missing), Most: int64(MovedBefore)})
	return Transferred(n), err
}

// Kind describes a kind of lock.
type Kind struct {
	Waiting
	Name  string // in logs and telemetry
	Queue string // kinds with the same one wait in the same queue of a process
	// HandOff is set if a claim can be passed on within the process.
	HandOff bool
	// NonReentrant is set if an owner that holds the lock gets an error instead of another hold.
	NonReentrant bool
	// HandleOnly is set if a hold ends by its own Unlock only: the kind has no UnlockOwner.
	HandleOnly bool
	// Renewed is what the script that renews a claim gets behind its id.
	Renewed string

	// The rest is nil if the kind does not need it, or has no such scripts.
	Grouped   Grouped // NewLock sets Group if it is set
	Batched   Batched
	Checker   Checker
	Positions Positions
}

// Protocol is what a kind of lock says to the server. Its methods block for one
// round trip. An error that is a reply of the server says that nothing was done.
type Protocol interface {
	Kind() Kind
	// Channel returns the channel of releases for the claim, or "". Each claim of an Ordered kind has one
	// of its own, whose name contains the id.
	Channel(c *Claim) string
	// Acquire makes one attempt.
	Acquire(ctx context.Context, c *Claim) (Answer, error)
	// Release gives the claim back, or its queue position.
	Release(ctx context.Context, c *Claim) (Release, error)
	// Extend gives the claim at least lease from now and reports whether the server has it.
	Extend(ctx context.Context, c *Claim, lease time.Duration) (bool, error)
	// Transfer renames the claim to another id, and sets its lease to exactly that time from now. Waiters learn
	// the new expiry. A repetition changes nothing.
	Transfer(ctx context.Context, c *Claim, to lock.Owner, lease time.Duration) (Transferred, error)
	// Renewer renews leases of this kind. It is comparable.
	Renewer() watchdog.Renewer
}

// Grouped is a Protocol that can make one attempt for several claims.
type Grouped interface {
	// AcquireAll makes one attempt for claims of one key, in their order, and returns an answer for each. An
	// error is about all of them.
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

// Batched is a Protocol with scripts that acquire, and release, several locks.
type Batched interface {
	// AcquireEach takes the locks of claims, in their order, up to the first
	// that somebody else has, or with all set none if there is one.
	AcquireEach(ctx context.Context, claims []*Claim, all bool) (MultiAnswer, error)
	// ReleaseEach is Release for several claims. The state of one that has to be released by
	// itself is Unreleased.
	ReleaseEach(ctx context.Context, claims []PendingRelease) ([]Release, error)
}

// Checker is a Protocol whose ownership check does more than extend the claim: it draws a token for each next
// hold, or finds out which waiters are next in the server's queue.
type Checker interface {
	// Confirm gives the claim at least its lease from now. It can be repeated.
	Confirm(ctx context.Context, c *Claim, check OwnershipCheck) (OwnershipResult, error)
}

// Positions is a Protocol whose waiters have queue positions on the server.
type Positions interface {
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
	Permits   bool   // each key names a semaphore, and the script gets the key of its acquired permits
}

// Renew implements watchdog.Renewer. If the slot of a batch is being moved and has keys on
// either side, its leases are renewed again, each by itself.
func (r ScriptRenewer) Renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, shared bool) []watchdog.Renewed {
	return r.RenewWith(ctx, batches, ttl, shared, r.Script, "")
}

// RenewWith is Renew with a script that also gets the keys of the subjects, after all others, and the argument more. A
// subject whose keys are on either side of a moving slot is renewed with r.Script. If more is "", script is
// r.Script. They are arguments, because some kinds allocate a ScriptRenewer for each hold.
func (r ScriptRenewer) RenewWith(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, shared bool,
	script *wire.Script, more string) []watchdog.Renewed {
	results := r.renew(ctx, batches, ttl, !shared, script, more)
	for b, batch := range batches {
		if len(batch) == 1 && more == "" || !wire.IsMoving(results[b].Err) {
			continue
		}
		results[b] = watchdog.Renewed{}
		for _, one := range r.renew(ctx, slices.Collect(slices.Chunk(batch, 1)), ttl, false, r.Script, "") {
			results[b].Held = append(results[b].Held, one.Err == nil && one.Held[0])
			results[b].Errs = append(results[b].Errs, one.Err)
		}
	}

	return results
}

// renew sends one script for each batch. With dedicated set it uses connections that other
// commands cannot delay; otherwise the connection of all other commands.
func (r ScriptRenewer) renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, dedicated bool,
	script *wire.Script, more string) []watchdog.Renewed {
	calls := make([]wire.Call, len(batches))
	for b, batch := range batches {
		keys := make([]string, 0, len(batch))
		args := make([]string, 1, 1+len(batch))
		args[0] = wire.Millis(ttl)
		for _, l := range batch {
			key := l.Key
			if r.Permits {
				key = wire.PermitTimeouts(key)
			}
			keys = append(keys, key)
			args = append(args, l.Owner+r.Suffix)
			if r.ReadHolds {
				keys = append(keys, wire.ReadHoldTimeout(l.Key, l.Owner, 1))
			}
		}
		if more != "" {
			for _, l := range batch {
				keys = append(keys, l.Key)
			}
			args = append(args, more)
		}
		calls[b] = wire.Call{Keys: keys, Args: args}
	}

	results := make([]watchdog.Renewed, len(batches))
	for b, reply := range script.ExecMany(ctx, r.Client, calls, dedicated) {
		held, err := wire.Numbers(reply, len(batches[b]), wire.Flags)
		results[b].Err = err
		for _, n := range held {
			results[b].Held = append(results[b].Held, n == 1)
		}
	}

	return results
}

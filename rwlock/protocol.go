package rwlock

import (
	"context"
	_ "embed"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

var (
	//go:embed holds.lua
	holdsLua string
	//go:embed acquire_read.lua
	acquireReadLua string
	//go:embed acquire_read_named.lua
	acquireReadNamedLua string
	//go:embed acquire_write.lua
	acquireWriteLua string
	//go:embed leave.lua
	leaveLua string
	//go:embed release_read.lua
	releaseReadLua string
	//go:embed release_write.lua
	releaseWriteLua string
	//go:embed hand_off.lua
	handOffLua string
	//go:embed extend.lua
	extendLua string
	//go:embed renew_read.lua
	renewReadLua string
	//go:embed force_unlock.lua
	forceUnlockLua string
	//go:embed is_locked.lua
	isLockedLua string

	acquireReadScript      = wire.NewScript(holdsLua + acquireReadLua)
	acquireReadNamedScript = wire.NewScript(holdsLua + acquireReadNamedLua)
	acquireWriteScript     = wire.NewScript(holdsLua + acquireWriteLua)
	leaveScript            = wire.NewScript(leaveLua)
	releaseReadScript      = wire.NewScript(holdsLua + releaseReadLua)
	releaseWriteScript     = wire.NewScript(holdsLua + releaseWriteLua)
	handOffScript          = wire.NewScript(holdsLua + handOffLua)
	extendScript           = wire.NewScript(holdsLua + extendLua)
	renewReadScript        = wire.NewScript(holdsLua + renewReadLua)
	forceUnlockScript      = wire.NewScript(holdsLua + forceUnlockLua)
	isLockedScript         = wire.NewScript(isLockedLua)
)

// The kinds of this package, as its scripts name them too.
const (
	kindRead  = "read"
	kindWrite = "write"
)

// replyPassed is what hand_off.lua says of a hold that it has passed on; its other
// replies are those of a release.
const replyPassed = -1

// The replies of acquire_write.lua.
const (
	replyAcquired = 1
	replyPlaced   = 2
	replyUpgrade  = 3
)

const (
	// writerLife is for how long a writer that waits keeps new readers out after
	// its last attempt, and writerPause how long it is quiet at most: an attempt
	// may be late, or fail, before they enter.
	writerLife  = 5 * time.Second
	writerPause = 2 * time.Second
)

// protocol is what readers and writers say alike.
type protocol struct {
	s       *session.Session
	kind    string
	payload string // of the message that the last hold of this kind is gone
}

// readProtocol is the protocol of readers. While readers hold, the writers of ours
// that wait keep new ones out: Redisson's do not, and can starve.
type readProtocol struct{ protocol }

// writeProtocol is the protocol of writers. One that waits for readers has a place
// on the server: it is in the set that keeps new readers out.
type writeProtocol struct{ protocol }

func newProtocol(s *session.Session, kind, payload string) protocol {
	return protocol{s: s, kind: kind, payload: payload}
}

func newReadProtocol(s *session.Session) *readProtocol {
	return &readProtocol{newProtocol(s, kindRead, wire.PayloadUnlocked)}
}

func newWriteProtocol(s *session.Session) *writeProtocol {
	return &writeProtocol{newProtocol(s, kindWrite, wire.PayloadWriteFree)}
}

// Readers and writers are one queue: whoever comes first is served first.
const queueKind = "rwlock"

func (p *readProtocol) Traits() locking.Traits {
	return locking.Traits{Kind: kindRead, Queue: queueKind, Eager: true, Shared: true, Group: true}
}

// Eager, because readers of this process do not know of those of others, whom an
// attempt keeps out.
func (p *writeProtocol) Traits() locking.Traits {
	return locking.Traits{Kind: kindWrite, Queue: queueKind, Eager: true}
}

func (p *protocol) Channel(c *locking.Claim) string { return wire.RWChannel(c.Key) }

// Backoff is not used: there is a channel.
func (p *protocol) Backoff(int) time.Duration { return 0 }

// lockAndWriters are the keys of scripts that care for writers that wait, and the
// ticket if the claim has one.
func lockAndWriters(c *locking.Claim) []string {
	return c.Keys(c.Key, wire.WriterWaits(c.Key))
}

func (p *readProtocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	if !c.Named() {
		answers, err := p.AcquireAll(ctx, []*locking.Claim{c})
		if err != nil {
			return locking.Answer{}, err
		}
		return answers[0], nil
	}
	n, err := acquireReadNamedScript.Exec(ctx, p.s.Client, lockAndWriters(c),
		[]string{wire.ReadHoldTimeouts(c.Key), p.s.Millis(c.Lease), c.Owner.String()}).AsInt64()
	return readAnswer(n), err
}

// AcquireAll implements locking.Grouped.
func (p *readProtocol) AcquireAll(ctx context.Context, claims []*locking.Claim) ([]locking.Answer, error) {
	args := make([]string, 1, 1+2*len(claims))
	args[0] = wire.ReadHoldTimeouts(claims[0].Key)
	for _, c := range claims {
		args = append(args, p.s.Millis(c.Lease), c.Owner.String())
	}
	replies, err := wire.Numbers(acquireReadScript.Exec(ctx, p.s.Client, lockAndWriters(claims[0]), args), len(claims))
	if err != nil {
		return nil, err
	}
	answers := make([]locking.Answer, len(replies))
	for i, n := range replies {
		answers[i] = readAnswer(n)
	}
	return answers, nil
}

func readAnswer(n int64) locking.Answer {
	if n == 0 {
		return locking.Answer{Acquired: true}
	}
	return locking.Answer{FreeIn: millis(-2 - n)}
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func (p *writeProtocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	reply, err := wire.Numbers(acquireWriteScript.Exec(ctx, p.s.Client, lockAndWriters(c), []string{
		p.s.Millis(c.Lease), c.Owner.String(), wire.Flag(c.Waits), wire.Millis(writerLife), wire.Millis(writerPause),
	}), 2)
	if err != nil {
		return locking.Answer{}, err
	}
	switch reply[0] {
	case replyAcquired:
		return locking.Answer{Acquired: true}, nil
	case replyUpgrade:
		return locking.Answer{Upgrade: true}, nil
	default:
		return locking.Answer{FreeIn: millis(reply[1]), Placed: reply[0] == replyPlaced}, nil
	}
}

// Leave implements locking.Placed.
func (p *writeProtocol) Leave(ctx context.Context, c *locking.Claim) error {
	return leaveScript.Exec(ctx, p.s.Client, []string{wire.WriterWaits(c.Key)},
		[]string{c.Owner.String(), p.s.Publish, p.Channel(c), p.payload}).Error()
}

// PlaceKeeper implements locking.Placed: attempts keep the places.
func (p *writeProtocol) PlaceKeeper() watchdog.Renewer { return nil }

// PlaceTime implements locking.Placed.
func (p *writeProtocol) PlaceTime() time.Duration { return 0 }

// HandOff passes from on to readers, or to one writer.
func (p *protocol) HandOff(ctx context.Context, from *locking.Claim, to []*locking.Claim) (locking.Passed, error) {
	args := []string{wire.ReadHoldTimeouts(from.Key), from.Owner.String(), p.s.Publish, p.Channel(from), p.payload, p.kind, to[0].Kind}
	for _, c := range to {
		args = append(args, p.s.Millis(c.Lease), c.Owner.String())
	}
	n, err := handOffScript.Exec(ctx, p.s.Client, lockAndWriters(from), args).AsInt64()
	if n == replyPassed {
		return locking.Passed{Answer: locking.Answer{Acquired: true}}, nil
	}
	return locking.Passed{Released: locking.ReleaseReply(n, p.s.PartialCounts)}, err
}

func (p *readProtocol) Release(ctx context.Context, c *locking.Claim, undo bool) (locking.Released, error) {
	return p.release(ctx, releaseReadScript, c.Keys(c.Key), c, undo)
}

func (p *writeProtocol) Release(ctx context.Context, c *locking.Claim, undo bool) (locking.Released, error) {
	return p.release(ctx, releaseWriteScript, lockAndWriters(c), c, undo)
}

func (p *protocol) release(ctx context.Context, script *wire.Script, keys []string, c *locking.Claim, undo bool) (locking.Released, error) {
	args := append([]string{
		wire.ReadHoldTimeouts(c.Key), c.Owner.String(), p.s.Publish, p.Channel(c), p.payload,
	}, c.ReleaseArgs(undo)...)
	n, err := script.Exec(ctx, p.s.Client, keys, args).AsInt64()
	return locking.ReleaseReply(n, p.s.PartialCounts), err
}

func (p *readProtocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	return p.extend(ctx, c, []string{c.Owner.String(), wire.Millis(lease), wire.ReadHoldTimeouts(c.Key)})
}

func (p *writeProtocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	return p.extend(ctx, c, []string{wire.WriteOwner(c.Owner), wire.Millis(lease)})
}

func (p *protocol) extend(ctx context.Context, c *locking.Claim, args []string) (bool, error) {
	return extendScript.Exec(ctx, p.s.Client, c.Keys(c.Key), args).AsBool()
}

func (p *readProtocol) Renewer() watchdog.Renewer { return readRenewer{p.s.Client} }

func (p *writeProtocol) Renewer() watchdog.Renewer {
	return locking.HashRenewer{Client: p.s.Client, Suffix: wire.WriteSuffix}
}

// readRenewer renews read holds.
type readRenewer struct{ client rueidis.Client }

// Renew implements watchdog.Renewer.
func (r readRenewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, detour bool) []watchdog.Renewed {
	return locking.RenewBatches(ctx, r.client, renewReadScript, batches, ttl, detour, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner, wire.ReadHoldTimeouts(l.Key))
	})
}

// force opens a lock that is held in this protocol's way, and reports whether it was.
func (p *protocol) force(ctx context.Context, key string) (bool, error) {
	return forceUnlockScript.Exec(ctx, p.s.Client, []string{key},
		[]string{wire.ReadHoldTimeouts(key), p.kind, p.s.Publish, wire.RWChannel(key), p.payload}).AsBool()
}

// isLocked reports whether anybody holds the lock in this protocol's way.
func (p *protocol) isLocked(ctx context.Context, key string) (bool, error) {
	return isLockedScript.Exec(ctx, p.s.Client, []string{key}, []string{p.kind}).AsBool()
}

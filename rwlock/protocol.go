package rwlock

import (
	"context"
	"embed"
	"math"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireReadScript  = engine.LoadScript(luaFiles, "holds", "acquire_read").AtRest()
	acquireWriteScript = engine.LoadScript(luaFiles, "holds", "acquire_write").AtRest()
	leaveScript        = wire.LoadScript(luaFiles, "leave").AtRest()
	releaseReadScript  = wire.LoadScript(luaFiles, "holds", "release_read").AtRest()
	releaseWriteScript = wire.LoadScript(luaFiles, "holds", "release_write").AtRest()
	transferScript     = wire.LoadScript(luaFiles, "holds", "transfer").AtRest()
	extendScript       = wire.LoadScript(luaFiles, "holds", "extend")
	renewReadScript    = wire.LoadScript(luaFiles, "holds", "renew_read")
	forceUnlockScript  = engine.LoadScript(luaFiles, "holds", "force_unlock").AtRest()
	isLockedScript     = wire.LoadScript(luaFiles, "is_locked")
)

// The kinds of this package, as its scripts name them too.
const (
	kindRead  = "read"
	kindWrite = "write"
)

// The replies of acquire_write.lua.
const (
	replyAcquired = 1
	replyBlocking = 2 // not acquired, and new readers are blocked

	replyForever = -1 // instead of a time: the lock has no expiry
)

const (
	// A waiting writer blocks new readers for writerLife after its last attempt. It
	// tries again after writerPause at the latest, so that readers stay blocked even if
	// an attempt is late or fails.
	writerLife  = 5 * time.Second
	writerPause = 2 * time.Second
)

// protocol is the common part of both protocols.
type protocol struct {
	s       *session.Session
	kind    string
	payload string // of the message that the last claim of this kind was released
}

// readProtocol is the protocol of readers. While readers hold the lock, waiting writers of
// redlatch block new readers. Those of Redisson do not, and can starve.
type readProtocol struct{ protocol }

// writeProtocol is the protocol of writers. A writer that waits for readers is in the set on
// the server that blocks new readers.
type writeProtocol struct{ protocol }

// newProtocols returns the protocols of both sides.
func newProtocols(s *session.Session) (*readProtocol, *writeProtocol) {
	return &readProtocol{protocol{s, kindRead, wire.PayloadUnlocked}},
		&writeProtocol{protocol{s, kindWrite, wire.PayloadWriteFree}}
}

// Readers and writers of a process wait in one queue, first come, first served.
const queueKind = "rwlock"

func (p *readProtocol) Kind() engine.Kind {
	return engine.Kind{
		Name:    kindRead,
		Queue:   queueKind,
		Waiting: engine.Waiting{Shareable: true, Shared: true},
		Grouped: p,
	}
}

// Kind implements engine.Protocol. A writer tries while this process has a hold: if that
// is a reader's, the attempt blocks new readers of other processes.
func (p *writeProtocol) Kind() engine.Kind {
	return engine.Kind{
		Name:      kindWrite,
		Queue:     queueKind,
		Waiting:   engine.Waiting{Shareable: true},
		HandOff:   true,
		Positions: p,
	}
}

func (p *protocol) Channel(c *engine.Claim) string { return wire.RWChannel(c.Key) }

// lockAndWriters returns the keys of most scripts.
func lockAndWriters(key string) []string { return []string{key, wire.WriterWaits(key)} }

func (p *readProtocol) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	return engine.AcquireOne(ctx, p, c)
}

// AcquireAll implements engine.Grouped.
func (p *readProtocol) AcquireAll(ctx context.Context, claims []*engine.Claim) ([]engine.Answer, error) {
	args := make([]string, 1, 1+3*len(claims))
	args[0] = wire.ReadHoldTimeouts(claims[0].Key)
	for _, c := range claims {
		writer := ""
		if !c.Writer.IsZero() {
			writer = c.Writer.String()
		}
		args = append(args, p.s.Millis(c.Lease), c.ID.String(), writer)
	}

	replies, err := wire.Numbers(acquireReadScript.Exec(ctx, p.s.Client, lockAndWriters(claims[0].Key), args), len(claims),
		wire.Range{Least: math.MinInt64})
	if err != nil {
		return nil, err
	}

	answers := make([]engine.Answer, len(replies))
	for i, n := range replies {
		if answers[i].Acquired = n == 0; n != 0 {
			answers[i].FreeIn = wire.Duration(-2 - n)
			answers[i].NoExpiry = n == -1
		}
	}

	return answers, nil
}

func (p *writeProtocol) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	reply, err := wire.Numbers(acquireWriteScript.Exec(ctx, p.s.Client, lockAndWriters(c.Key), []string{
		p.s.Millis(c.Lease), c.ID.String(), wire.Flag(c.Waits), wire.Millis(writerLife),
	}), 2, wire.Range{Most: replyBlocking}, wire.Times)
	if err != nil {
		return engine.Answer{}, err
	}

	a := engine.Answer{
		Acquired: reply[0] == replyAcquired, FreeIn: wire.Duration(reply[1]), NoExpiry: reply[1] == replyForever,
		Queued: reply[0] == replyBlocking,
	}
	if a.Queued && (a.NoExpiry || a.FreeIn > writerPause) {
		a.FreeIn = writerPause
	}
	return a, nil
}

// Leave implements engine.Positions.
func (p *writeProtocol) Leave(ctx context.Context, c *engine.Claim) error {
	return leaveScript.Exec(ctx, p.s.Client, []string{wire.WriterWaits(c.Key)},
		[]string{c.ID.String(), p.s.Publish, p.Channel(c), p.payload}).Error()
}

// HeartbeatRenewer implements engine.Positions: attempts serve as heartbeats.
func (p *writeProtocol) HeartbeatRenewer() watchdog.Renewer { return nil }

// PositionTTL implements engine.Positions.
func (p *writeProtocol) PositionTTL() time.Duration { return 0 }

func (p *readProtocol) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	return p.release(ctx, releaseReadScript, c)
}

func (p *writeProtocol) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	return p.release(ctx, releaseWriteScript, c)
}

func (p *protocol) release(ctx context.Context, script *wire.Script, c *engine.Claim) (engine.Release, error) {
	return engine.ReleaseReply(script.Exec(ctx, p.s.Client, lockAndWriters(c.Key), []string{
		wire.ReadHoldTimeouts(c.Key), c.ID.String(), p.s.Publish, p.Channel(c), p.payload,
	}), p.s.PartialCounts)
}

func (p *readProtocol) Extend(ctx context.Context, c *engine.Claim, lease time.Duration) (bool, error) {
	id := c.ID.String()
	return p.extend(ctx, []string{c.Key, wire.ReadHoldTimeout(c.Key, id, 1)}, []string{id, wire.Millis(lease)})
}

func (p *writeProtocol) Extend(ctx context.Context, c *engine.Claim, lease time.Duration) (bool, error) {
	return p.extend(ctx, []string{c.Key}, []string{wire.WriteOwner(c.ID), wire.Millis(lease)})
}

func (p *protocol) extend(ctx context.Context, keys, args []string) (bool, error) {
	return wire.Bool(extendScript.Exec(ctx, p.s.Client, keys, args))
}

func (p *protocol) Transfer(ctx context.Context, c *engine.Claim, to lock.Owner, lease time.Duration) (engine.Transferred, error) {
	return engine.TransferReply(transferScript.Exec(ctx, p.s.Client, lockAndWriters(c.Key), []string{
		wire.ReadHoldTimeouts(c.Key), c.ID.String(), to.String(), wire.Millis(lease), p.kind,
		p.s.Publish, p.Channel(c), p.payload,
	}))
}

func (p *readProtocol) Renewer() watchdog.Renewer {
	return engine.ScriptRenewer{Client: p.s.Client, Script: renewReadScript, ReadHolds: true}
}

func (p *writeProtocol) Renewer() watchdog.Renewer {
	return engine.ScriptRenewer{Client: p.s.Client, Script: engine.HashRenewScript, Suffix: wire.WriteSuffix}
}

// force opens a lock that is in this protocol's mode, and reports whether it was.
func (p *protocol) force(ctx context.Context, key string) (bool, error) {
	return wire.Bool(forceUnlockScript.Exec(ctx, p.s.Client, lockAndWriters(key),
		[]string{wire.ReadHoldTimeouts(key), p.kind, p.s.Publish, wire.RWChannel(key), p.payload}))
}

// isLocked reports whether this side of the lock is held.
func (p *protocol) isLocked(ctx context.Context, key string) (bool, error) {
	return wire.Bool(isLockedScript.Exec(ctx, p.s.Client, []string{key}, []string{p.kind}))
}

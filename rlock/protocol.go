package rlock

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
	//go:embed acquire.lua
	acquireLua string
	//go:embed acquire_named.lua
	acquireNamedLua string
	//go:embed release.lua
	releaseLua string
	//go:embed release_named.lua
	releaseNamedLua string
	//go:embed hand_off.lua
	handOffLua string
	//go:embed extend.lua
	extendLua string
	//go:embed force_unlock.lua
	forceUnlockLua string
	//go:embed reset_tokens.lua
	resetTokensLua string

	acquireScript      = wire.NewScript(acquireLua)
	acquireNamedScript = wire.NewScript(acquireNamedLua)
	releaseScript      = wire.NewScript(releaseLua)
	releaseNamedScript = wire.NewScript(releaseNamedLua)
	handOffScript      = wire.NewScript(handOffLua)
	extendScript       = wire.NewScript(extendLua)
	forceUnlockScript  = wire.NewScript(forceUnlockLua)
	resetTokensScript  = wire.NewScript(resetTokensLua)
)

// The replies of the release scripts.
const (
	replyShared    = -1
	replyNotHeld   = 0
	replyStillHeld = 1
	replyFree      = 2 // and more
)

// latchLife is for how long the result of a release is kept for its
// repetitions: longer than they go on.
const latchLife = 16 * time.Second

// protocol is the plain hash lock with its variations: all kinds of this
// package are the same on the server but for the fencing counter and the
// message of a release.
type protocol struct {
	s            *session.Session
	kind         string
	fenced       bool
	silent       bool // publishes nothing and hears nothing
	nonReentrant bool
	backoff      Backoff // if silent
	// partialCounts is set where PUBLISH does not know all subscribers: those of
	// other nodes of a cluster.
	partialCounts bool
}

func newProtocol(s *session.Session, kind string) *protocol {
	return &protocol{s: s, kind: kind, partialCounts: s.Cluster() && !s.Sharded}
}

func (p *protocol) Traits() locking.Traits { return locking.Traits{Kind: p.kind, Queue: p.kind} }

func (p *protocol) Channel(c *locking.Claim) string {
	if p.silent {
		return ""
	}
	return wire.LockChannel(c.Key)
}

func (p *protocol) Backoff(n int) time.Duration { return p.backoff(n) }

func (p *protocol) Renewer() watchdog.Renewer {
	return locking.HashRenewer{Client: p.s.Client}
}

// publish is the command that a release script publishes with.
func (p *protocol) publish() string {
	if p.silent {
		return ""
	}
	return p.s.Publish
}

func (p *protocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	lease := wire.Millis(c.Lease)
	if !c.Named() {
		if p.fenced {
			return acquireAnswer(acquireScript.Exec(ctx, p.s.Client, []string{c.Key, wire.FencingToken(c.Key)}, []string{lease, c.Owner.String()}))
		}
		return acquireAnswer(acquireScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{lease, c.Owner.String()}))
	}
	keys := []string{c.Key, wire.UnlockLatch(c.Key, c.Ticket)}
	if p.fenced {
		keys = append(keys, wire.FencingToken(c.Key))
	}
	again := "1"
	if p.nonReentrant {
		again = "0"
	}
	return acquireAnswer(acquireNamedScript.Exec(ctx, p.s.Client, keys, []string{lease, c.Owner.String(), again}))
}

func acquireAnswer(reply rueidis.RedisResult) (locking.Answer, error) {
	n, err := reply.AsInt64()
	switch {
	case rueidis.IsRedisNil(err):
		return locking.Answer{Reentered: true}, nil
	case err != nil:
		return locking.Answer{}, err
	case n >= 0:
		return locking.Answer{Acquired: true, Token: n}, nil
	default:
		return locking.Answer{FreeIn: time.Duration(-2-n) * time.Millisecond}, nil
	}
}

func (p *protocol) HandOff(ctx context.Context, from *locking.Claim, to []*locking.Claim) (locking.Passed, error) {
	keys := []string{from.Key}
	if p.fenced {
		keys = append(keys, wire.FencingToken(from.Key))
	}
	n, err := handOffScript.Exec(ctx, p.s.Client, keys,
		[]string{from.Owner.String(), to[0].Owner.String(), wire.Millis(to[0].Lease)}).AsInt64()
	if rueidis.IsRedisNil(err) {
		return locking.Passed{}, nil
	}
	return locking.Passed{Answer: locking.Answer{Acquired: err == nil, Token: n}}, err
}

func (p *protocol) Release(ctx context.Context, c *locking.Claim, undo bool) (locking.Released, error) {
	channel := p.Channel(c)
	var reply rueidis.RedisResult
	if c.Named() {
		which := "hold"
		switch {
		case c.AnyHold:
			which = "any"
		case undo:
			which = "undo"
		}
		reply = releaseNamedScript.Exec(ctx, p.s.Client,
			[]string{c.Key, wire.UnlockLatch(c.Key, c.Ticket)},
			[]string{c.Owner.String(), p.publish(), channel, wire.PayloadUnlocked, wire.Millis(latchLife), which})
	} else {
		reply = releaseScript.Exec(ctx, p.s.Client, []string{c.Key},
			[]string{c.Owner.String(), p.publish(), channel, wire.PayloadUnlocked})
	}
	n, err := reply.AsInt64()
	switch {
	case err != nil, n == replyNotHeld:
		return locking.Released{}, err
	case n == replyShared:
		return locking.Released{State: locking.Shared}, nil
	case n == replyStillHeld:
		return locking.Released{State: locking.StillHeld}, nil
	case p.silent || p.partialCounts:
		return locking.Released{State: locking.Free, Told: -1}, nil
	default:
		return locking.Released{State: locking.Free, Told: int(n - replyFree)}, nil
	}
}

func (p *protocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	keys := []string{c.Key}
	if c.Named() {
		keys = append(keys, wire.UnlockLatch(c.Key, c.Ticket))
	}
	n, err := extendScript.Exec(ctx, p.s.Client, keys, []string{c.Owner.String(), wire.Millis(lease)}).AsInt64()
	return n == 1, err
}

package rlock

import (
	"context"
	"embed"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireScript     = engine.LoadScript(luaFiles, "acquire")
	acquireEachScript = engine.LoadScript(luaFiles, "acquire_each")
	releaseScript     = wire.LoadScript(luaFiles, "release")
	releaseEachScript = wire.LoadScript(luaFiles, "release_each")
	transferScript    = wire.LoadScript(luaFiles, "transfer")
	confirmScript     = engine.LoadScript(luaFiles, "confirm_fenced")
	forceUnlockScript = engine.LoadScript(luaFiles, "force_unlock")
	resetTokensScript = wire.LoadScript(luaFiles, "reset_tokens")
	raiseTokensScript = engine.LoadScript(luaFiles, "raise_tokens")
)

// protocol is the protocol of the locks that are stored as a hash. On the server they differ
// only in the fencing counter and the message of a release.
type protocol struct {
	settings
	e       *engine.Engine
	s       *session.Session // of e
	kind    string
	fenced  bool
	silent  bool   // neither publishes nor subscribes
	channel string // of the lock, unless silent
}

func (p *protocol) Kind() engine.Kind {
	k := engine.Kind{
		Name:         p.kind,
		Queue:        p.kind,
		Waiting:      engine.Waiting{Backoff: p.backoff},
		HandOff:      true,
		NonReentrant: p.nonReentrant,
	}
	if p.fenced {
		k.Checker = p
	} else if !p.silent {
		k.Batched = p
	}
	return k
}

func (p *protocol) Channel(*engine.Claim) string { return p.channel }

func (p *protocol) Renewer() watchdog.Renewer { return p.e.HashRenewer() }

// publish is the command that a release script publishes with.
func (p *protocol) publish() string {
	if p.silent {
		return ""
	}
	return p.s.Publish
}

func (p *protocol) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	keys := []string{c.Key}
	if p.fenced {
		keys = append(keys, wire.FencingToken(c.Key))
	}
	return acquireAnswer(acquireScript.Exec(ctx, p.s.Client, keys, []string{p.s.Millis(c.Lease), c.ID.String()}))
}

func acquireAnswer(reply rueidis.RedisResult) (engine.Answer, error) {
	if m, _ := reply.ToMessage(); m.IsInt64() {
		token, err := wire.Number(reply, wire.Tokens)
		return engine.Answer{Acquired: true, Token: token}, err
	}

	taken, err := wire.Numbers(reply, 1, wire.Times)
	if err != nil {
		return engine.Answer{}, err
	}

	return engine.Answer{FreeIn: wire.Duration(taken[0]), NoExpiry: taken[0] == -1}, nil
}

func (p *protocol) AcquireEach(ctx context.Context, claims []*engine.Claim, all bool) (engine.MultiAnswer, error) {
	keys := make([]string, 0, usual)
	args := make([]string, 0, 2+usual)
	args = append(args, p.s.Millis(claims[0].Lease), wire.Flag(all))
	for _, c := range claims {
		keys = append(keys, c.Key)
		args = append(args, c.ID.String())
	}
	reply := acquireEachScript.Exec(ctx, p.s.Client, keys, args)
	if n, err := wire.Number(reply, wire.Flags); err == nil && n == 0 {
		return engine.MultiAnswer{Acquired: len(claims)}, nil
	}

	some := wire.Range{Most: int64(len(claims)) - 1}
	numbers, err := wire.Numbers(reply, 3, some, wire.Times, some)
	if err != nil {
		return engine.MultiAnswer{}, err
	}

	return engine.MultiAnswer{
		Acquired: int(numbers[0]), FreeIn: wire.Duration(numbers[1]), FirstConflict: int(numbers[2]),
	}, nil
}

// usual is how many locks one script acquires without an allocation for their keys.
const usual = 4

// maxTokens bounds how many tokens a check draws: unused ones leave a gap.
const maxTokens = 16

// Confirm implements engine.Checker, for fenced locks: each hold needs a token of its own.
func (p *protocol) Confirm(ctx context.Context, c *engine.Claim, check engine.OwnershipCheck) (engine.OwnershipResult, error) {
	n := max(0, min(len(check.Next), maxTokens)-check.Tokens)
	reply, err := wire.Numbers(confirmScript.Exec(ctx, p.s.Client, []string{c.Key, wire.FencingToken(c.Key)},
		[]string{c.ID.String(), p.s.Millis(c.Lease), strconv.Itoa(n)}), 3, wire.Flags, wire.Range{Most: int64(n)}, wire.Tokens)
	if err != nil {
		return engine.OwnershipResult{}, err
	}
	drawn := reply[1]
	last := reply[2]
	return engine.OwnershipResult{Held: reply[0] == 1, Tokens: int(drawn), Token: last - drawn + 1}, nil
}

func (p *protocol) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	return engine.ReleaseReply(releaseScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{c.ID.String(), p.publish(), p.Channel(c), wire.PayloadUnlocked}), p.silent || p.s.PartialCounts)
}

func (p *protocol) ReleaseEach(ctx context.Context, claims []engine.PendingRelease) ([]engine.Release, error) {
	keys := make([]string, 0, usual)
	args := make([]string, 0, 2+2*usual)
	args = append(args, p.publish(), wire.PayloadUnlocked)
	for _, c := range claims {
		keys = append(keys, c.Key)
		args = append(args, c.ID.String(), c.Channel)
	}
	reply := releaseEachScript.Exec(ctx, p.s.Client, keys, args)
	released := make([]engine.Release, len(claims))
	if n, err := wire.Number(reply, engine.Releases); err == nil {
		for i := range released {
			released[i] = engine.ReleasedBy(n, p.s.PartialCounts)
		}
		return released, nil
	}

	replies, err := wire.Numbers(reply, len(claims), wire.Range{Least: int64(engine.Unreleased), Most: engine.Releases.Most})
	if err != nil {
		return nil, err
	}

	for i, n := range replies {
		released[i] = engine.ReleasedBy(n, p.s.PartialCounts)
	}
	return released, nil
}

func (p *protocol) Extend(ctx context.Context, c *engine.Claim, lease time.Duration) (bool, error) {
	return wire.Bool(engine.ExtendScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{c.ID.String(), wire.Millis(lease)}))
}

func (p *protocol) Transfer(ctx context.Context, c *engine.Claim, to lock.Owner, lease time.Duration) (engine.Transferred, error) {
	return engine.TransferReply(transferScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{
		c.ID.String(), to.String(), wire.Millis(lease), p.publish(), p.Channel(c), wire.PayloadUnlocked,
	}))
}

package rlock

import (
	"context"
	"embed"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireScript     = locking.LoadScript(luaFiles, "acquire")
	acquireEachScript = locking.LoadScript(luaFiles, "acquire_each")
	releaseScript     = wire.LoadScript(luaFiles, "release")
	releaseEachScript = wire.LoadScript(luaFiles, "release_each")
	transferScript    = wire.LoadScript(luaFiles, "transfer")
	confirmScript     = locking.LoadScript(luaFiles, "confirm_fenced")
	forceUnlockScript = locking.LoadScript(luaFiles, "force_unlock")
	resetTokensScript = wire.LoadScript(luaFiles, "reset_tokens")
)

// protocol is the protocol of the locks that are stored as a hash. On the server they differ
// only in the fencing counter and the message of a release.
type protocol struct {
	settings
	s       *session.Session
	kind    string
	fenced  bool
	silent  bool   // neither publishes nor subscribes
	channel string // of the lock, unless silent
}

func (p *protocol) Traits() locking.Traits {
	return locking.Traits{
		Policy: acquire.Policy{Backoff: p.backoff},
		Kind:   p.kind, Queue: p.kind, Batch: !p.fenced && !p.silent, Cohorts: true, NonReentrant: p.nonReentrant,
	}
}

func (p *protocol) Channel(*locking.Claim) string { return p.channel }

func (p *protocol) Renewer() watchdog.Renewer { return locking.Renewer(p.s) }

// publish is the command that a release script publishes with.
func (p *protocol) publish() string {
	if p.silent {
		return ""
	}
	return p.s.Publish
}

func (p *protocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	keys := []string{c.Key}
	if p.fenced {
		keys = append(keys, wire.FencingToken(c.Key))
	}
	return acquireAnswer(acquireScript.Exec(ctx, p.s.Client, keys, []string{p.s.Millis(c.Lease), c.ID.String()}))
}

func acquireAnswer(reply rueidis.RedisResult) (locking.Answer, error) {
	if m, _ := reply.ToMessage(); m.IsInt64() {
		token, err := wire.Number(reply, wire.Tokens)
		return locking.Answer{Acquired: true, Token: token}, err
	}
	taken, err := wire.Numbers(reply, 1, wire.Times)
	if err != nil {
		return locking.Answer{}, err
	}
	return locking.Answer{FreeIn: wire.Duration(taken[0]), NoExpiry: taken[0] == -1}, nil
}

func (p *protocol) AcquireEach(ctx context.Context, claims []*locking.Claim, all bool) (locking.Several, error) {
	keys, args := make([]string, 0, usual), make([]string, 0, 2+usual)
	args = append(args, p.s.Millis(claims[0].Lease), wire.Flag(all))
	for _, c := range claims {
		keys, args = append(keys, c.Key), append(args, c.ID.String())
	}
	reply := acquireEachScript.Exec(ctx, p.s.Client, keys, args)
	if n, err := wire.Number(reply, wire.Flags); err == nil && n == 0 {
		return locking.Several{Acquired: len(claims)}, nil
	}
	some := wire.Range{Most: int64(len(claims)) - 1}
	numbers, err := wire.Numbers(reply, 3, some, wire.Times, some)
	if err != nil {
		return locking.Several{}, err
	}
	return locking.Several{
		Acquired: int(numbers[0]), FreeIn: wire.Duration(numbers[1]), InTheWay: int(numbers[2]),
	}, nil
}

// usual is how many locks one script acquires without an allocation for their keys.
const usual = 4

// fencedProtocol is the protocol of fenced locks. Each hold needs a token of its own.
type fencedProtocol struct{ *protocol }

// maxTokens bounds how many tokens a question draws: unused ones leave a gap.
const maxTokens = 16

// Confirm implements locking.Prepared.
func (p fencedProtocol) Confirm(ctx context.Context, c *locking.Claim, q locking.Question) (locking.Confirmation, error) {
	n := max(0, min(len(q.Next), maxTokens)-q.Tokens)
	reply, err := wire.Numbers(confirmScript.Exec(ctx, p.s.Client, []string{c.Key, wire.FencingToken(c.Key)},
		[]string{c.ID.String(), p.s.Millis(c.Lease), strconv.Itoa(n)}), 3, wire.Flags, wire.Range{Most: int64(n)}, wire.Tokens)
	if err != nil {
		return locking.Confirmation{}, err
	}
	drawn, last := reply[1], reply[2]
	return locking.Confirmation{Stands: reply[0] == 1, Tokens: int(drawn), Token: last - drawn + 1}, nil
}

func (p *protocol) Release(ctx context.Context, c *locking.Claim) (locking.Released, error) {
	return locking.ReleaseReply(releaseScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{c.ID.String(), p.publish(), p.Channel(c), wire.PayloadUnlocked}), p.silent || p.s.PartialCounts)
}

func (p *protocol) ReleaseEach(ctx context.Context, claims []locking.Freeing) ([]locking.Released, error) {
	keys, args := make([]string, 0, usual), make([]string, 0, 2+2*usual)
	args = append(args, p.publish(), wire.PayloadUnlocked)
	for _, c := range claims {
		keys, args = append(keys, c.Key), append(args, c.ID.String(), c.Channel)
	}
	reply := releaseEachScript.Exec(ctx, p.s.Client, keys, args)
	released := make([]locking.Released, len(claims))
	if n, err := wire.Number(reply, locking.Releases); err == nil {
		for i := range released {
			released[i] = locking.ReleasedBy(n, p.s.PartialCounts)
		}
		return released, nil
	}
	replies, err := wire.Numbers(reply, len(claims), wire.Range{Least: int64(locking.Unreleased), Most: locking.Releases.Most})
	if err != nil {
		return nil, err
	}
	for i, n := range replies {
		released[i] = locking.ReleasedBy(n, p.s.PartialCounts)
	}
	return released, nil
}

func (p *protocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	return wire.Bool(locking.ExtendScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{c.ID.String(), wire.Millis(lease)}))
}

func (p *protocol) Transfer(ctx context.Context, c *locking.Claim, to lock.Owner, lease time.Duration) (locking.Transferred, error) {
	return locking.TransferReply(transferScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{
		c.ID.String(), to.String(), wire.Millis(lease), p.publish(), p.Channel(c), wire.PayloadUnlocked,
	}))
}

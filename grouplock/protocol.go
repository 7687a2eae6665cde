package grouplock

import (
	"context"
	"embed"
	"math"
	"strings"
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
	acquireScript     = engine.LoadScript(luaFiles, "group", "acquire")
	releaseScript     = engine.LoadScript(luaFiles, "group", "release")
	extendScript      = engine.LoadScript(luaFiles, "group", "extend")
	renewScript       = engine.LoadScript(luaFiles, "group", "renew")
	transferScript    = engine.LoadScript(luaFiles, "group", "transfer")
	forceUnlockScript = engine.LoadScript(luaFiles, "group", "force_unlock")
	statusScript      = engine.LoadScript(luaFiles, "group", "status")
)

// kindName is the kind in logs and telemetry.
const kindName = "group"

// protocol is the protocol of the lock of some values. To the server a claim is the owner of each of them, with a lease
// of its own.
type protocol struct {
	s      *session.Session
	fields []string // of the values, sorted
}

// Kind implements engine.Protocol. Callers that want the same values wait in one queue. Those that want others do not
// wait for them, so they have another queue, and a caller that shares some values with them competes with them as with
// another process.
func (p *protocol) Kind() engine.Kind {
	values := " " + strings.Join(p.fields, " ")
	return engine.Kind{Name: kindName, Queue: kindName + values, Renewed: values, HandOff: true}
}

func (p *protocol) Channel(c *engine.Claim) string { return wire.LockChannel(c.Key) }

// exec runs a script with these arguments before the values.
func (p *protocol) exec(ctx context.Context, script *wire.Script, key string, args ...string) rueidis.RedisResult {
	return script.Exec(ctx, p.s.Client, []string{key}, append(args, p.fields...))
}

func (p *protocol) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	taken, err := wire.Number(p.exec(ctx, acquireScript, c.Key, p.s.Millis(c.Lease), c.ID.String()), wire.Range{Most: math.MaxInt64})
	if err != nil {
		return engine.Answer{}, err
	}
	return engine.Answer{Acquired: taken == 0, FreeIn: wire.Duration(taken)}, nil
}

func (p *protocol) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	return engine.ReleaseReply(p.exec(ctx, releaseScript, c.Key, c.ID.String(), p.s.Publish, p.Channel(c)), p.s.PartialCounts)
}

func (p *protocol) Extend(ctx context.Context, c *engine.Claim, lease time.Duration) (bool, error) {
	return wire.Bool(p.exec(ctx, extendScript, c.Key, c.ID.String(), wire.Millis(lease)))
}

func (p *protocol) Transfer(ctx context.Context, c *engine.Claim, to lock.Owner, lease time.Duration) (engine.Transferred, error) {
	return engine.TransferReply(p.exec(ctx, transferScript, c.Key,
		c.ID.String(), to.String(), wire.Millis(lease), p.s.Publish, p.Channel(c)))
}

func (p *protocol) Renewer() watchdog.Renewer {
	return engine.ScriptRenewer{Client: p.s.Client, Script: renewScript}
}

// force frees the values, and reports whether one was locked.
func (p *protocol) force(ctx context.Context, key string) (bool, error) {
	return wire.Bool(p.exec(ctx, forceUnlockScript, key, p.s.Publish, wire.LockChannel(key)))
}

// status returns when all leases of the values will be over, 0 if the values are free, and how often owner has locked
// them.
func (p *protocol) status(ctx context.Context, key, owner string) (left time.Duration, count int64, err error) {
	times := wire.Range{Most: math.MaxInt64}
	numbers, err := wire.Numbers(p.exec(ctx, statusScript, key, owner), 2, times, times)
	if err != nil {
		return 0, 0, err
	}
	return wire.Duration(numbers[0]), numbers[1], nil
}

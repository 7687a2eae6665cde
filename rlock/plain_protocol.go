package rlock

import (
	"context"
	_ "embed"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

var (
	//go:embed plain_acquire.lua
	plainAcquireLua string
	//go:embed plain_release.lua
	plainReleaseLua string
	//go:embed plain_hand_off.lua
	plainHandOffLua string
	//go:embed plain_extend.lua
	plainExtendLua string
	//go:embed plain_renew.lua
	plainRenewLua string
	//go:embed plain_force_unlock.lua
	plainForceUnlockLua string

	plainAcquireScript     = wire.NewScript(plainAcquireLua)
	plainReleaseScript     = wire.NewScript(plainReleaseLua)
	plainHandOffScript     = wire.NewScript(plainHandOffLua)
	plainExtendScript      = wire.NewScript(plainExtendLua)
	plainRenewScript       = wire.NewScript(plainRenewLua)
	plainForceUnlockScript = wire.NewScript(plainForceUnlockLua)
)

// kindPlain is the kind of a plain lock.
const kindPlain = "plain"

// plainProtocol is a string with a value for each acquisition. That value does what
// else a ticket does: every request can be repeated.
type plainProtocol struct {
	s       *session.Session
	backoff Backoff
}

func (p *plainProtocol) Traits() locking.Traits {
	return locking.Traits{Kind: kindPlain, Queue: kindPlain, Single: true, Polled: true, Relayed: true}
}

func (p *plainProtocol) Channel(c *locking.Claim) string { return wire.PlainChannel(c.Key) }

func (p *plainProtocol) Backoff(n int) time.Duration { return p.backoff(n) }

func (p *plainProtocol) Renewer() watchdog.Renewer { return plainRenewer{p.s.Client} }

func (p *plainProtocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	return acquireAnswer(plainAcquireScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{p.s.Millis(c.Lease), c.Holder(), c.Owner.String()}))
}

func (p *plainProtocol) HandOff(ctx context.Context, from *locking.Claim, to []*locking.Claim) (locking.Passed, error) {
	passed, err := plainHandOffScript.Exec(ctx, p.s.Client, []string{from.Key},
		[]string{from.Holder(), to[0].Holder(), p.s.Millis(to[0].Lease)}).AsBool()
	return locking.Passed{Answer: locking.Answer{Acquired: passed}}, err
}

func (p *plainProtocol) Release(ctx context.Context, c *locking.Claim, _ bool) (locking.Released, error) {
	if c.AnyHold {
		value, err := p.value(ctx, c.Key)
		if err != nil {
			return locking.Released{}, err
		}
		ticket, held := ticketOf(c.Owner, value)
		if !held {
			return locking.Released{}, nil
		}
		// From here on it is about that hold, also when it is repeated.
		c.Ticket, c.AnyHold = ticket, false
	}
	payload := wire.PayloadUnlocked
	if c.LeftOpen {
		payload = wire.PayloadLeftOpen
	}
	n, err := plainReleaseScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{c.Holder(), p.s.Publish, p.Channel(c), payload}).AsInt64()
	return locking.ReleaseReply(n, p.s.PartialCounts), err
}

func (p *plainProtocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	return plainExtendScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{c.Holder(), wire.Millis(lease)}).AsBool()
}

// value returns what is stored under key, "" if nothing is.
func (p *plainProtocol) value(ctx context.Context, key string) (string, error) {
	value, err := wire.Read(ctx, p.s.Client, "GET", key).ToString()
	if rueidis.IsRedisNil(err) {
		return "", nil
	}
	return value, err
}

// ticketOf reports whether a value is of a hold of that owner, and returns what it
// has behind the owner: nothing if the owner was made for it.
func ticketOf(o lock.Owner, value string) (ticket string, held bool) {
	rest, held := strings.CutPrefix(value, o.String())
	if !held || rest == "" {
		return "", held
	}
	return strings.CutPrefix(rest, ":")
}

// plainRenewer renews plain locks.
type plainRenewer struct{ client rueidis.Client }

// Renew implements watchdog.Renewer.
func (r plainRenewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, detour bool) []watchdog.Renewed {
	return locking.RenewBatches(ctx, r.client, plainRenewScript, batches, ttl, detour, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner)
	})
}

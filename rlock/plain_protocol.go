package rlock

import (
	"context"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

var (
	plainAcquireScript     = wire.LoadScript(luaFiles, "plain_acquire")
	plainReleaseScript     = wire.LoadScript(luaFiles, "plain_release")
	plainExtendScript      = wire.LoadScript(luaFiles, "plain_extend")
	plainRenewScript       = wire.LoadScript(luaFiles, "plain_renew")
	plainForceUnlockScript = wire.LoadScript(luaFiles, "plain_force_unlock")
)

// kindPlain is the kind of a plain lock.
const kindPlain = "plain"

// plainProtocol is a string whose value is the claim.
type plainProtocol struct {
	s       *session.Session
	backoff Backoff
}

func (p *plainProtocol) Traits() locking.Traits {
	return locking.Traits{Kind: kindPlain, Queue: kindPlain, HasPollers: true, Backoff: p.backoff, Cohorts: true, NonReentrant: true}
}

func (p *plainProtocol) Channel(c *locking.Claim) string { return wire.PlainChannel(c.Key) }

func (p *plainProtocol) Renewer() watchdog.Renewer { return plainRenewer{p.s.Client} }

func (p *plainProtocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	return acquireAnswer(plainAcquireScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{p.s.Millis(c.Lease), c.ID.String()}))
}

func (p *plainProtocol) Release(ctx context.Context, c *locking.Claim) (locking.Released, error) {
	payload := wire.PayloadUnlocked
	if c.LeftOpen {
		payload = wire.PayloadLeftOpen
	}
	n, err := plainReleaseScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{c.ID.String(), p.s.Publish, p.Channel(c), payload}).AsInt64()
	return locking.ReleaseReply(n, p.s.PartialCounts), err
}

func (p *plainProtocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	return plainExtendScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{c.ID.String(), wire.Millis(lease)}).AsBool()
}

// plainRenewer renews plain locks.
type plainRenewer struct{ client rueidis.Client }

// Renew implements watchdog.Renewer.
func (r plainRenewer) Renew(ctx context.Context, batches [][]*watchdog.Lease, ttl time.Duration, shared bool) []watchdog.Renewed {
	return locking.RenewBatches(ctx, r.client, plainRenewScript, batches, ttl, shared, func(args []string, l *watchdog.Lease) []string {
		return append(args, l.Owner)
	})
}

package rlock

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Plain is the lock that most other libraries implement: a string with a unique value for each
// acquisition. SET NX PX acquires it, and the holder of the value deletes or extends it. It
// excludes the locks of redsync, redislock and most hand-written locks with the same name.
// Redisson has no such lock. It is not reentrant: for another acquisition by its owner the
// error matches lock.ErrReentered.
//
// The other locks of this package have another type on the server. A plain lock and one of
// those with the same name get WRONGTYPE errors from each other; other libraries see a lock
// that is held.
//
// A release of redlatch wakes waiters. Other libraries publish no releases, so waiters also try
// when the lease ends, and after pauses that grow to a quarter of a second; see Backoff.
//
// Other libraries poll, and would rarely find a lock free for which many callers of a process
// contend. So after every 3 s of hand-offs a process leaves the lock free for 0.3 s, in which
// no waiter of redlatch tries, but a first attempt does. Pauses of pollers should not exceed 0.25 s; the
// default pauses of redsync do not. Pollers compete for that time among themselves, so one may still give up: beside
// 8 callers of redlatch that hold the lock for 20 ms, about one in a hundred calls of redsync does.
type Plain struct {
	object
	s *session.Session
}

// NewPlain returns the plain lock of that name. Client.PlainLock calls it.
func NewPlain(e *engine.Engine, name string, backoff ...Backoff) *Plain {
	pauses, err := lastOf(backoff, ExponentialBackoff(10*time.Millisecond, 250*time.Millisecond, 2))
	p := &plainProtocol{s: e.Session, settings: settings{nonReentrant: true, backoff: pauses}}
	l := engine.NewLock(e, p, name, err)
	return &Plain{newObject(&l), e.Session}
}

// ForceUnlock opens the lock, regardless of its holder, and wakes the waiters of redlatch. It
// reports whether the lock was held. This client's hold is lost at once. Any other hold of redlatch
// is lost at its next renewal, after at most a third of its lease, or, if its lease is fixed, at the
// end of the lease. Until then its context does not end. ForceUnlock blocks for one round trip.
//
// Other libraries may have written any text, so every string counts as a lock, except the strings of other
// objects. For an integer without an expiry, which may be a semaphore or a latch, ForceUnlock returns an error
// and has no effect, as for a key that is not a string. For a name in the form of a key that
// belongs to another object, such as the memory of once-only work, the error matches lock.ErrInvalid.
func (l *Plain) ForceUnlock(ctx context.Context) (bool, error) {
	key := l.l.Key()
	if k, ok := wire.ParseKey(key); ok && k.Form().Type == "string" {
		return false, l.l.Object().Refused("force unlock", fmt.Errorf("%w: the name is a key of another object, %q", lock.ErrInvalid, k.Name))
	}
	return l.l.Force(ctx, func() (bool, error) {
		return wire.Bool(plainForceUnlockScript.Exec(ctx, l.s.Client, []string{key},
			[]string{l.s.Publish, wire.PlainChannel(key), wire.PayloadUnlocked}))
	})
}

// HoldCount returns 1 if owner has a hold in this process or is the value on the server, and
// 0 otherwise. It blocks for one round trip unless owner has a hold in this process.
func (l *Plain) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return l.l.HoldCount(ctx, owner, func() (int64, error) {
		value, err := wire.Read(ctx, l.s.Client, "GET", l.l.Key()).ToString()
		if value == owner.String() {
			return 1, err
		}
		return 0, err
	})
}

var (
	plainAcquireScript     = wire.LoadScript(luaFiles, "plain_acquire")
	plainReleaseScript     = wire.LoadScript(luaFiles, "plain_release")
	plainExtendScript      = wire.LoadScript(luaFiles, "plain_extend")
	plainTransferScript    = wire.LoadScript(luaFiles, "plain_transfer")
	plainRenewScript       = wire.LoadScript(luaFiles, "plain_renew")
	plainForceUnlockScript = wire.LoadScript(luaFiles, "plain_force_unlock")
)

// plainProtocol is a string whose value is the claim.
type plainProtocol struct {
	settings
	s *session.Session
}

func (p *plainProtocol) Kind() engine.Kind {
	return engine.Kind{
		Name:         "plain",
		Queue:        "plain",
		Waiting:      engine.Waiting{Backoff: p.backoff, LeftOpen: wire.PayloadLeftOpen},
		HandOff:      true,
		NonReentrant: p.nonReentrant,
	}
}

func (p *plainProtocol) Channel(c *engine.Claim) string { return wire.PlainChannel(c.Key) }

func (p *plainProtocol) Renewer() watchdog.Renewer {
	return engine.ScriptRenewer{Client: p.s.Client, Script: plainRenewScript}
}

func (p *plainProtocol) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	return acquireAnswer(plainAcquireScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{p.s.Millis(c.Lease), c.ID.String()}))
}

func (p *plainProtocol) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	payload := wire.PayloadUnlocked
	if c.LeftOpen {
		payload = wire.PayloadLeftOpen
	}
	return engine.ReleaseReply(plainReleaseScript.Exec(ctx, p.s.Client, []string{c.Key},
		[]string{c.ID.String(), p.s.Publish, p.Channel(c), payload}), p.s.PartialCounts)
}

func (p *plainProtocol) Extend(ctx context.Context, c *engine.Claim, lease time.Duration) (bool, error) {
	return wire.Bool(plainExtendScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{c.ID.String(), wire.Millis(lease)}))
}

func (p *plainProtocol) Transfer(ctx context.Context, c *engine.Claim, to lock.Owner, lease time.Duration) (engine.Transferred, error) {
	return engine.TransferReply(plainTransferScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{
		c.ID.String(), to.String(), wire.Millis(lease), p.s.Publish, p.Channel(c), wire.PayloadUnlocked,
	}))
}

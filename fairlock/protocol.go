package fairlock

import (
	"context"
	"embed"
	"slices"
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
	acquireScript     = engine.LoadScript(luaFiles, "positions", "acquire").AtRest()
	confirmScript     = wire.LoadScript(luaFiles, "positions", "confirm").AtRest()
	releaseScript     = wire.LoadScript(luaFiles, "positions", "release").AtRest()
	transferScript    = wire.LoadScript(luaFiles, "positions", "transfer").AtRest()
	leaveScript       = wire.LoadScript(luaFiles, "positions", "leave").AtRest()
	heartbeatScript   = wire.LoadScript(luaFiles, "positions", "heartbeat").AtRest()
	forceUnlockScript = engine.LoadScript(luaFiles, "positions", "force_unlock").AtRest()
	queueScript       = wire.LoadScript(luaFiles, "positions", "queue")
)

// The replies of acquire.lua for a claim; 1 is a refusal.
const (
	replyAcquired = 0
	replyWaits    = 2
	replyEntered  = 3 // waits, behind all others

	replyForever = -2 // instead of a time: the lock has no expiry
)

// maxPositionTTL bounds how long a waiter whose process has died delays the waiters
// behind it.
const maxPositionTTL = 10 * time.Second

// Option configures a lock object. nil is invalid.
type Option func(*protocol) error

// NonReentrant makes a second acquisition by the same owner fail with an error
// that matches lock.ErrReentered. It makes no difference on the server: the lock excludes
// a reentrant fair lock of the same name.
func NonReentrant() Option {
	return func(p *protocol) error {
		p.nonReentrant = true
		return nil
	}
}

// Waiter is an entry in the queue of a fair lock.
type Waiter struct {
	// Owner is the owner that the lock will have when the waiter acquires it, or the zero
	// Owner if lock.ParseOwner does not accept it.
	Owner lock.Owner
	// Deadline is when the waiter loses its queue position, by the server's clock, unless
	// it sends a heartbeat first. Waiters of redlatch send heartbeats while they wait; those
	// of Java send none.
	Deadline time.Time
}

// protocol is the hash lock with a queue beside it.
type protocol struct {
	e            *engine.Engine
	s            *session.Session // of e
	kind         string
	candidacy    bool // of an election
	nonReentrant bool
	keys         []string // of the lock and its queue
	args         []string // the first args of most scripts
}

func (p *protocol) Kind() engine.Kind {
	return engine.Kind{
		Name:         p.kind,
		Queue:        p.kind,
		Waiting:      engine.Waiting{Ordered: true},
		HandOff:      !p.candidacy,
		NonReentrant: p.nonReentrant,
		HandleOnly:   p.candidacy,
		Grouped:      p,
		Checker:      p,
		Positions:    p,
	}
}

func (p *protocol) Channel(c *engine.Claim) string { return wire.FairChannel(c.Key, c.ID) }

func (p *protocol) Renewer() watchdog.Renewer { return p.e.HashRenewer() }

// PositionTTL implements engine.Positions. It is short, because a dead waiter delays the
// waiters behind it for that long, and at most the user's limit for that delay.
func (p *protocol) PositionTTL() time.Duration {
	return min(maxPositionTTL, p.s.WatchdogTimeout/3, p.s.FairWait)
}

// HeartbeatRenewer implements engine.Positions.
func (p *protocol) HeartbeatRenewer() watchdog.Renewer {
	return heartbeats{client: p.s.Client, wait: p.s.FairWait, positionTTL: p.PositionTTL(), publish: p.s.Publish}
}

// keys returns the keys of the lock and its queue.
func keys(key string) []string {
	return []string{key, wire.FairQueue(key), wire.FairTimeouts(key), wire.FairAlive(key), wire.FairOrder(key)}
}

// prepare sets what all requests for the lock with that key have in common.
func (p *protocol) prepare(key string) {
	p.keys = keys(key)
	p.args = []string{
		wire.Millis(p.s.FairWait), wire.Millis(p.PositionTTL()), p.s.Publish, wire.LockChannel(key), wire.PayloadUnlocked,
	}
}

func (p *protocol) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	return engine.AcquireOne(ctx, p, c)
}

func (p *protocol) AcquireAll(ctx context.Context, claims []*engine.Claim) ([]engine.Answer, error) {
	args := append(make([]string, 0, len(p.args)+3*len(claims)), p.args...)
	for _, c := range claims {
		args = append(args, c.ID.String(), p.s.Millis(c.Lease), wire.Flag(c.Waits))
	}
	numbers, err := wire.Numbers(acquireScript.Exec(ctx, p.s.Client, p.keys, args), 2*len(claims),
		wire.Range{Least: replyAcquired, Most: replyEntered}, wire.Times)
	if err != nil {
		return nil, err
	}

	answers := make([]engine.Answer, len(claims))
	for i := range answers {
		result := numbers[2*i]
		answers[i] = engine.Answer{
			Acquired: result == replyAcquired,
			FreeIn:   wire.Duration(numbers[2*i+1]),
			NoExpiry: numbers[2*i+1] == replyForever,
			Queued:   result == replyWaits || result == replyEntered,
			Requeued: result == replyEntered,
		}
	}

	return answers, nil
}

// Confirm implements engine.Checker. A waiter is ready if only waiters of this process are
// before it in the queue.
func (p *protocol) Confirm(ctx context.Context, c *engine.Claim, check engine.OwnershipCheck) (engine.OwnershipResult, error) {
	args := append(make([]string, 0, len(p.args)+3+len(check.Passed)+len(check.Next)), p.args...)
	args = append(args, c.ID.String(), p.s.Millis(c.Lease), strconv.Itoa(len(check.Passed)))
	reply, err := wire.Numbers(confirmScript.Exec(ctx, p.s.Client, p.keys, withOwners(withOwners(args, check.Passed), check.Next)), 2,
		wire.Flags, wire.Range{Most: int64(len(check.Next))})
	if err != nil {
		return engine.OwnershipResult{}, err
	}
	return engine.OwnershipResult{Held: reply[0] == 1, Ready: int(reply[1])}, nil
}

func withOwners(args []string, owners []lock.Owner) []string {
	for _, o := range owners {
		args = append(args, o.String())
	}
	return args
}

func (p *protocol) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	args := slices.Concat(p.args, []string{c.ID.String()})
	if len(c.Passed) > 0 {
		args = withOwners(args, c.Passed)
	}
	return engine.ReleaseReply(releaseScript.Exec(ctx, p.s.Client, p.keys, args), p.s.PartialCounts)
}

func (p *protocol) Extend(ctx context.Context, c *engine.Claim, lease time.Duration) (bool, error) {
	return wire.Bool(engine.ExtendScript.Exec(ctx, p.s.Client, []string{c.Key}, []string{c.ID.String(), wire.Millis(lease)}))
}

func (p *protocol) Transfer(ctx context.Context, c *engine.Claim, to lock.Owner, lease time.Duration) (engine.Transferred, error) {
	return engine.TransferReply(transferScript.Exec(ctx, p.s.Client, p.keys,
		slices.Concat(p.args, []string{c.ID.String(), to.String(), wire.Millis(lease)})))
}

// Leave implements engine.Positions.
func (p *protocol) Leave(ctx context.Context, c *engine.Claim) error {
	return leaveScript.Exec(ctx, p.s.Client, p.keys, slices.Concat(p.args, []string{c.ID.String()})).Error()
}

// Force opens the lock and reports whether it was held.
func (p *protocol) Force(ctx context.Context) (bool, error) {
	return wire.Bool(forceUnlockScript.Exec(ctx, p.s.Client, p.keys, p.args))
}

// maxQueue bounds the waiters that Queue returns.
const maxQueue = 10_000

// Queue returns the first live waiters in order.
func (p *protocol) Queue(ctx context.Context) ([]Waiter, error) {
	reply, err := wire.List(queueScript.Exec(ctx, p.s.Client, p.keys, []string{wire.Millis(p.s.FairWait), strconv.Itoa(maxQueue)}),
		0, 2*maxQueue)
	if err != nil {
		return nil, err
	}

	waiters := make([]Waiter, 0, len(reply)/2)
	for i := 1; i < len(reply); i += 2 {
		name, err := wire.Text(reply[i-1])
		if err != nil {
			return nil, err
		}
		dies, err := wire.Times.Number(reply[i])
		if err != nil {
			return nil, err
		}
		owner, _ := lock.ParseOwner(name) // else the zero Owner
		waiters = append(waiters, Waiter{Owner: owner, Deadline: time.UnixMilli(dies)})
	}

	return waiters, nil
}

// heartbeats sends the heartbeats of waiters. Its leases are queue positions, each with the key
// of its lock.
type heartbeats struct {
	client      rueidis.Client
	wait        time.Duration
	positionTTL time.Duration
	publish     string
}

// Renew implements watchdog.Renewer. It renews for positionTTL, whatever the time of a
// lease.
func (h heartbeats) Renew(ctx context.Context, batches [][]watchdog.Subject, _ time.Duration, shared bool) []watchdog.Renewed {
	calls := make([]wire.Call, len(batches))
	order := make([][]int, len(batches)) // of the leases of a batch, in the script
	for b, batch := range batches {
		of := make(map[string][]int) // leases by lock
		var locks []string
		for i, l := range batch {
			if of[l.Key] == nil {
				locks = append(locks, l.Key)
			}
			of[l.Key] = append(of[l.Key], i)
		}
		args := []string{wire.Millis(h.wait), wire.Millis(h.positionTTL), h.publish, wire.PayloadUnlocked}
		var all []string
		for _, key := range locks {
			all = append(all, keys(key)...)
			args = append(args, wire.LockChannel(key), strconv.Itoa(len(of[key])))
			for _, i := range of[key] {
				args = append(args, batch[i].Owner)
			}
			order[b] = append(order[b], of[key]...)
		}
		calls[b] = wire.Call{Keys: all, Args: args}
	}

	results := make([]watchdog.Renewed, len(batches))
	for b, reply := range heartbeatScript.ExecMany(ctx, h.client, calls, !shared) {
		alive, err := wire.Numbers(reply, len(batches[b]), wire.Flags)
		results[b].Err = err
		if err != nil {
			continue
		}
		results[b].Held = make([]bool, len(alive))
		for n, i := range order[b] {
			results[b].Held[i] = alive[n] == 1
		}
	}

	return results
}

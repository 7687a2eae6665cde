package fairlock

import (
	"context"
	_ "embed"
	"slices"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

var (
	//go:embed places.lua
	placesLua string
	//go:embed acquire.lua
	acquireLua string
	//go:embed acquire_named.lua
	acquireNamedLua string
	//go:embed release.lua
	releaseLua string
	//go:embed release_named.lua
	releaseNamedLua string
	//go:embed leave.lua
	leaveLua string
	//go:embed beat.lua
	beatLua string
	//go:embed force_unlock.lua
	forceUnlockLua string
	//go:embed rename.lua
	renameLua string
	//go:embed queue.lua
	queueLua string

	acquireScript      = wire.NewScript(placesLua + acquireLua)
	acquireNamedScript = wire.NewScript(placesLua + acquireNamedLua)
	releaseScript      = wire.NewScript(placesLua + releaseLua)
	releaseNamedScript = wire.NewScript(placesLua + releaseNamedLua)
	extendScript       = wire.NewScript(locking.ExtendLua)
	leaveScript        = wire.NewScript(placesLua + leaveLua)
	beatScript         = wire.NewScript(placesLua + beatLua)
	forceUnlockScript  = wire.NewScript(placesLua + forceUnlockLua)
	renameScript       = wire.NewScript(renameLua)
	queueScript        = wire.NewScript(placesLua + queueLua)
)

// What the acquire scripts say of a claim.
const (
	replyAcquired  = 0
	replyRefused   = 1
	replyWaits     = 2
	replyEntered   = 3 // waits, behind all others
	replyReentered = 4
)

// replyPassed is what release.lua says of a hold that it has passed on.
const replyPassed = -2

// maxPlaceTime bounds for how long a waiter whose process has died holds up those
// behind it.
const maxPlaceTime = 10 * time.Second

// Option changes a lock object.
type Option func(*protocol)

// NonReentrant makes a second acquisition by the same owner fail with an error
// that matches lock.ErrReentered, instead of counting it. It is on the server
// what a reentrant fair lock is, and excludes one of the same name.
func NonReentrant() Option {
	return func(p *protocol) { p.nonReentrant = true }
}

// Waiter is a place in the queue of a fair lock.
type Waiter struct {
	// Owner is who waits, or the zero Owner if it is none that lock.ParseOwner
	// knows.
	Owner lock.Owner
	// Deadline is when the waiter loses its place, by the server's clock, unless it
	// gives a sign of life before. A waiter of this library gives them for as long
	// as it waits, so its deadline moves on; a waiter in Java gives none.
	Deadline time.Time
}

// protocol is the hash lock with a queue beside it.
type protocol struct {
	s            *session.Session
	nonReentrant bool
	own          common // of the lock that it is the protocol of
}

// common is what the scripts about a lock have in common: the keys, and the first args.
type common struct {
	key        string
	keys, args []string
}

func newProtocol(s *session.Session) *protocol {
	return &protocol{s: s}
}

func (p *protocol) Traits() locking.Traits {
	return locking.Traits{Kind: "fair", Queue: "fair", Ordered: true}
}

func (p *protocol) Channel(c *locking.Claim) string { return wire.FairChannel(c.Key, c.Owner) }

// Backoff is not asked for: there is a channel.
func (p *protocol) Backoff(int) time.Duration { return 0 }

func (p *protocol) Renewer() watchdog.Renewer {
	return locking.Renewer(p.s)
}

// PlaceTime is short, because it is what a dead waiter costs those behind it, and
// never longer than the user wants to wait for one.
func (p *protocol) PlaceTime() time.Duration {
	return min(maxPlaceTime, p.s.WatchdogTimeout/3, p.s.FairWait)
}

func (p *protocol) PlaceKeeper() watchdog.Renewer {
	return placeKeeper{client: p.s.Client, wait: p.s.FairWait, life: p.PlaceTime(), publish: p.s.Publish}
}

// keys are those of the lock and its queue.
func keys(key string) []string {
	return []string{key, wire.FairQueue(key), wire.FairTimeouts(key), wire.FairAlive(key)}
}

// about returns what nearly every script about a lock has first.
func (p *protocol) about(key string) common {
	if key == p.own.key {
		return p.own
	}
	return common{key, keys(key), []string{
		wire.Millis(p.s.FairWait), wire.Millis(p.PlaceTime()), p.s.Publish, wire.LockChannel(key), wire.PayloadUnlocked,
	}}
}

// withKeys returns the keys, and behind them that of the claim's ticket if it has one.
func (a common) withKeys(c *locking.Claim) []string { return c.Keys(slices.Clip(a.keys)...) }

// with returns the args, and more.
func (a common) with(more ...string) []string {
	return append(append(make([]string, 0, len(a.args)+len(more)), a.args...), more...)
}

func (p *protocol) Acquire(ctx context.Context, c *locking.Claim) (locking.Answer, error) {
	var answers []locking.Answer
	var err error
	if c.Named() {
		about := p.about(c.Key)
		answers, err = acquireAnswers(1, acquireNamedScript.Exec(ctx, p.s.Client, about.withKeys(c),
			about.with(c.Owner.String(), p.s.Millis(c.Lease), wire.Flag(c.Waits), wire.Flag(!p.nonReentrant))))
	} else {
		answers, err = p.AcquireAll(ctx, []*locking.Claim{c})
	}
	if err != nil {
		return locking.Answer{}, err
	}
	return answers[0], nil
}

func (p *protocol) AcquireAll(ctx context.Context, claims []*locking.Claim) ([]locking.Answer, error) {
	about := p.about(claims[0].Key)
	args := append(make([]string, 0, len(about.args)+3*len(claims)), about.args...)
	for _, c := range claims {
		args = append(args, c.Owner.String(), p.s.Millis(c.Lease), wire.Flag(c.Waits))
	}
	return acquireAnswers(len(claims), acquireScript.Exec(ctx, p.s.Client, about.keys, args))
}

func acquireAnswers(claims int, reply rueidis.RedisResult) ([]locking.Answer, error) {
	said, err := wire.Numbers(reply, 2*claims)
	if err != nil {
		return nil, err
	}
	answers := make([]locking.Answer, claims)
	for i := range answers {
		what, freeIn := said[2*i], time.Duration(said[2*i+1])*time.Millisecond
		switch what {
		case replyAcquired:
			answers[i].Acquired = true
		case replyReentered:
			answers[i].Reentered = true
		default:
			answers[i].FreeIn = freeIn
			answers[i].Placed = what == replyWaits || what == replyEntered
			answers[i].Moved = what == replyEntered
		}
	}
	return answers, nil
}

// HandOff passes the lock on to the waiter that is first in the queue, if that is
// the one it is called for, and frees it otherwise. Without one it frees it too.
func (p *protocol) HandOff(ctx context.Context, from *locking.Claim, to []*locking.Claim) (locking.Passed, error) {
	next, lease := "", ""
	if len(to) > 0 {
		next, lease = to[0].Owner.String(), p.s.Millis(to[0].Lease)
	}
	n, err := p.release(ctx, from, next, lease)
	if n == replyPassed {
		return locking.Passed{Answer: locking.Answer{Acquired: true}}, nil
	}
	released := locking.ReleaseReply(n, p.s.PartialCounts)
	if released.State == locking.Shared {
		return locking.Passed{}, nil // nothing was done
	}
	return locking.Passed{Released: released}, err
}

func (p *protocol) Release(ctx context.Context, c *locking.Claim, undo bool) (locking.Released, error) {
	var n int64
	var err error
	if c.Named() {
		about := p.about(c.Key)
		args := about.with(append([]string{c.Owner.String()}, c.ReleaseArgs(undo)...)...)
		n, err = releaseNamedScript.Exec(ctx, p.s.Client, about.withKeys(c), args).AsInt64()
	} else {
		n, err = p.release(ctx, c, "", "")
	}
	return locking.ReleaseReply(n, p.s.PartialCounts), err
}

func (p *protocol) release(ctx context.Context, from *locking.Claim, to, lease string) (int64, error) {
	about := p.about(from.Key)
	return releaseScript.Exec(ctx, p.s.Client, about.keys, about.with(from.Owner.String(), to, lease)).AsInt64()
}

func (p *protocol) Extend(ctx context.Context, c *locking.Claim, lease time.Duration) (bool, error) {
	return extendScript.Exec(ctx, p.s.Client, c.Keys(c.Key), []string{c.Owner.String(), wire.Millis(lease)}).AsBool()
}

// Rename implements locking.Renamer.
func (p *protocol) Rename(ctx context.Context, from, to *locking.Claim) (bool, error) {
	return renameScript.Exec(ctx, p.s.Client, []string{from.Key}, []string{from.Owner.String(), to.Owner.String()}).AsBool()
}

// Leave gives up the place of the claim's owner, who may be that of other waiters
// if it was named.
func (p *protocol) Leave(ctx context.Context, c *locking.Claim) error {
	about := p.about(c.Key)
	return leaveScript.Exec(ctx, p.s.Client, about.keys, about.with(c.Owner.String())).Error()
}

// Force opens the lock, whoever holds it, and reports whether anybody did.
func (p *protocol) Force(ctx context.Context, key string) (bool, error) {
	about := p.about(key)
	return forceUnlockScript.Exec(ctx, p.s.Client, about.keys, about.args).AsBool()
}

// Queue returns who waits and is alive, the first first.
func (p *protocol) Queue(ctx context.Context, key string) ([]Waiter, error) {
	reply, err := queueScript.Exec(ctx, p.s.Client, keys(key), []string{wire.Millis(p.s.FairWait)}).ToArray()
	if err != nil {
		return nil, err
	}
	waiters := make([]Waiter, 0, len(reply)/2)
	for pair := range slices.Chunk(reply, 2) {
		name, err := pair[0].ToString()
		if err != nil {
			return nil, err
		}
		dies, err := pair[len(pair)-1].AsInt64()
		if err != nil {
			return nil, err
		}
		owner, _ := lock.ParseOwner(name) // else the zero Owner
		waiters = append(waiters, Waiter{Owner: owner, Deadline: time.UnixMilli(dies)})
	}
	return waiters, nil
}

// placeKeeper gives signs of life for waiters. A lease of it is a place: its key is
// that of the lock.
type placeKeeper struct {
	client  rueidis.Client
	wait    time.Duration
	life    time.Duration
	publish string
}

// Renew implements watchdog.Renewer, for the time that a place is kept, whatever
// the time of a lease.
func (k placeKeeper) Renew(ctx context.Context, batches [][]*watchdog.Lease, _ time.Duration, detour bool) []watchdog.Renewed {
	return locking.RenewApart(batches, detour, func(batches [][]*watchdog.Lease, apart bool) []watchdog.Renewed {
		return k.renew(ctx, batches, apart)
	})
}

func (k placeKeeper) renew(ctx context.Context, batches [][]*watchdog.Lease, apart bool) []watchdog.Renewed {
	calls := make([]wire.Call, len(batches))
	order := make([][]int, len(batches)) // of the leases of a batch, as the script has them
	for b, batch := range batches {
		of := make(map[string][]int) // leases by lock
		var locks []string
		for i, l := range batch {
			if of[l.Key] == nil {
				locks = append(locks, l.Key)
			}
			of[l.Key] = append(of[l.Key], i)
		}
		args := []string{wire.Millis(k.wait), wire.Millis(k.life), k.publish, wire.PayloadUnlocked}
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
	for b, reply := range beatScript.ExecMany(ctx, k.client, calls, apart) {
		alive, err := wire.Numbers(reply, len(batches[b]))
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

package robustness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

const (
	// watchdogTimeout is short, so that a failure of one second loses holds.
	watchdogTimeout = time.Second
	maxDepth        = 3 // of re-entry
)

// goroutines is the number of goroutines of a worker: two for each kind, and two for the latches.
var goroutines = 2 * (len(kinds) + 1)

// process returns a worker process, which plays until a time is reached.
func process(play func(w *worker, seed, number uint64, until int64)) func(args []string) error {
	return func(args []string) error {
		addr, dir, id := args[0], args[1], "w"+args[3]
		seed, errSeed := strconv.ParseUint(args[2], 10, 64)
		number, errNumber := strconv.ParseUint(args[3], 10, 32)
		until, errUntil := strconv.ParseInt(args[4], 10, 64)
		j, err := openJournal(filepath.Join(dir, id+journalExt))
		if err := errors.Join(errSeed, errNumber, errUntil, err); err != nil {
			return err
		}
		var c *redlatch.Client
		for c == nil {
			if clock() >= until {
				return j.close()
			}
			// The server may be down or paused.
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			if c, err = connect(ctx, addr, redlatch.WithTracerProvider(tracing{journal: j})); err != nil {
				time.Sleep(10 * time.Millisecond)
			}
			cancel()
		}
		play(&worker{id: id, client: c, journal: j}, seed, number, until)
		c.Close()
		j.write(event{What: ended, At: clock(), Claim: id})
		return j.close()
	}
}

// contend acquires and releases the round's locks in every way, in several goroutines.
func contend(w *worker, seed, number uint64, until int64) {
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			p := player{worker: w, rng: rand.New(rand.NewPCG(seed, number*uint64(goroutines)+uint64(g)))}
			i := g % (len(kinds) + 1) // one kind, so that no other is idle while it is held
			if i == len(kinds) {
				p.countLatches(seed, until)
				return
			}
			p.kind, p.locks = kinds[i].name, strings.Join(locksOf(seed, i), ",")
			p.leases, p.long = !kinds[i].forever, cmp.Or(kinds[i].long, 1)
			for clock() < until {
				if p.kind == "permits" && p.chance(1) {
					p.oversize(seed)
				}
				p.play(kinds[i].of(w.client, seed), p.chance(kinds[i].named))
			}
		})
	}
	wg.Wait()
}

func connect(ctx context.Context, addr string, opts ...redlatch.Option) (*redlatch.Client, error) {
	opts = append(opts, redlatch.WithWatchdogTimeout(watchdogTimeout), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
	return redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, opts...)
}

// worker is the state shared by the goroutines of a process.
type worker struct {
	id      string
	client  *redlatch.Client
	journal *journal
	claims  atomic.Int64
}

// player is one goroutine of a worker.
type player struct {
	*worker
	rng         *rand.Rand
	kind, locks string // for the journal
	leases      bool   // whether holds have one
	long        int    // of 100 holds
}

func (p *player) chance(percent int) bool { return p.rng.IntN(100) < percent }

func (p *player) between(from, to time.Duration) time.Duration {
	return from + time.Duration(p.rng.Int64N(int64(to-from)))
}

// taken is a hold and its claim in the journal.
type taken struct {
	lock.Hold
	claim string
}

// play acquires a lock once, or several times if the owner is named, holds it and releases it.
func (p *player) play(l lock.Locker, named bool) {
	ctx, depth := context.Background(), 1
	if named {
		ctx, depth = lock.WithOwner(ctx, p.client.NewOwner()), 1+p.rng.IntN(maxDepth)
	}
	var holds []taken
	for range depth {
		if h, ok := p.lock(ctx, l); ok {
			holds = append(holds, h)
			p.hold(h)
		}
	}
	// In any order: the server only counts.
	p.rng.Shuffle(len(holds), func(i, j int) { holds[i], holds[j] = holds[j], holds[i] })
	for i, h := range holds {
		if i > 0 {
			p.hold(h)
		}
		p.unlock(h)
	}
}

// lock makes one acquisition, in one of several ways.
func (p *player) lock(ctx context.Context, l lock.Locker) (taken, bool) {
	var opts []lock.Option
	if p.leases && p.chance(40) {
		opts = append(opts, lock.Lease(p.between(5*time.Millisecond, 60*time.Millisecond)))
	}
	if p.chance(20) {
		h, err := p.acquire(ctx, l, l.TryLock, 0, opts)
		return h, err == nil
	}
	if p.chance(20) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer time.AfterFunc(p.between(0, 300*time.Millisecond), cancel).Stop()
	}
	wait := p.between(0, 1500*time.Millisecond)
	h, err := p.acquire(ctx, l, l.Lock, wait, append(opts, lock.Wait(wait)))
	return h, err == nil
}

type call func(context.Context, ...lock.Option) (lock.Hold, error)

// acquire calls Lock or TryLock.
func (p *player) acquire(ctx context.Context, l lock.Locker, call call, wait time.Duration, opts []lock.Option) (taken, error) {
	claim := fmt.Sprintf("%s#%d", p.id, p.claims.Add(1))
	e := event{What: locking, Claim: claim, Lock: p.locks, Kind: p.kind, Wait: wait}
	if o, err := lock.Resolve(opts...); err == nil {
		e.Fixed = o.Lease > 0
	}
	if o, ok := lock.OwnerFrom(ctx); ok {
		e.Owner, e.Named = o.String(), true
	}
	e.At = clock()
	p.journal.write(e)
	h, err := call(context.WithValue(ctx, claimKey{}, claim), opts...)
	at := clock()
	if err != nil {
		p.journal.write(event{What: notLocked, At: at, Claim: claim, Outcome: outcomeOfLock(err), Err: err.Error()})
		return taken{}, err
	}
	p.journal.write(event{What: locked, At: at, Claim: claim, Token: h.Token()})
	t := taken{h, claim}
	p.look(t)
	return t, nil
}

// look records how long ownership is certain and reports whether it is.
func (p *player) look(h taken) bool {
	now := clock() // read first, so that the deadline is never too early
	left := h.Remaining()
	if left > 0 {
		p.journal.write(event{What: seen, At: now, Claim: h.claim, Until: now + int64(left)})
	}
	return left > 0
}

// silence bounds how long the context may outlast the lease.
const silence = 10 * time.Second

// hold sleeps for the duration of a hold.
func (p *player) hold(h taken) {
	var d time.Duration
	switch n := p.rng.IntN(100); {
	case n < 85:
		d = p.between(0, 3*time.Millisecond)
	case n < 100-p.long: // past the end of many fixed leases
		d = p.between(5*time.Millisecond, 80*time.Millisecond)
	default: // through some renewals
		d = p.between(300*time.Millisecond, 1300*time.Millisecond)
	}
	for end := time.Now().Add(d); time.Now().Before(end); {
		if p.chance(5) {
			_ = h.Extend(context.Background(), p.between(20*time.Millisecond, 1200*time.Millisecond)) // look reports the loss
		}
		if !p.look(h) {
			select {
			case <-h.Context().Done():
			case <-time.After(silence):
				p.journal.write(event{What: silent, At: clock(), Claim: h.claim})
			}
			// Unlock would then release the lock of another owner.
			time.Sleep(p.between(0, 20*time.Millisecond))
			return
		}
		time.Sleep(min(time.Until(end), p.between(time.Millisecond, 20*time.Millisecond)))
	}
}

func (p *player) unlock(h taken) {
	if !p.look(h) {
		p.journal.write(event{What: over, At: clock(), Claim: h.claim})
	}
	p.journal.write(event{What: unlocking, At: clock(), Claim: h.claim})
	err := h.Unlock(context.Background())
	e := event{What: unlocked, Claim: h.claim, Outcome: fine}
	var lost *lock.LostError
	if errors.As(err, &lost) {
		since := time.Since(lost.When) // read first, so that the loss is never too late
		e.Lost = clock() - int64(since)
	}
	if err != nil {
		e.Outcome, e.Err = outcomeOfUnlock(err, lost), err.Error()
	}
	e.At = clock()
	p.journal.write(e)
}

func outcomeOfLock(err error) outcome {
	switch {
	case isWrong(err), errors.Is(err, lock.ErrNotHeld):
		return wrong
	case errors.Is(err, lock.ErrIndeterminate):
		return unknown
	case errors.Is(err, lock.ErrNotAcquired):
		return refused
	default:
		return failed
	}
}

func outcomeOfUnlock(err error, lost *lock.LostError) outcome {
	switch {
	case lost != nil && lost.Reason == lock.ReasonExpired:
		return expired
	case lost != nil && lost.Reason == lock.ReasonGone:
		return gone
	case lost != nil, isWrong(err), errors.Is(err, lock.ErrNotHeld):
		return wrong
	case errors.Is(err, lock.ErrIndeterminate):
		return unknown
	default:
		return failed
	}
}

// isWrong reports whether neither Lock nor Unlock may return err here, whatever the nemesis
// does.
func isWrong(err error) bool {
	for _, target := range []error{lock.ErrReentered, lock.ErrInvalid, lock.ErrClosed, lock.ErrUnsupported} {
		if errors.Is(err, target) {
			return true
		}
	}
	_, isReply := rueidis.IsRedisErr(err)
	return isReply
}

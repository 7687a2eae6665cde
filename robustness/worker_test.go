package robustness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

const (
	// watchdogTimeout is short, so that a failure of one second loses holds.
	watchdogTimeout = time.Second
	// patience is the watchdog timeout of clients whose heartbeats are rare.
	patience = 9 * time.Second
	maxDepth = 3 // of re-entry
)

// times is how many times the goroutines of a slow kind there are in rounds of few kinds: the queues are
// longer.
const times = 3

// goroutines is the number of goroutines of a worker: two for each kind, and two for the latches.
var goroutines = 2 * (len(kinds) + 1)

// process returns a worker process, which plays until a time is reached.
func process(play func(w *worker, seed, number uint64, until int64)) func(args []string) error {
	return func(args []string) error {
		began := clock()
		addr, dir, id := args[0], args[1], "w"+args[3]
		seed, errSeed := strconv.ParseUint(args[2], 10, 64)
		number, errNumber := strconv.ParseUint(args[3], 10, 32)
		until, errUntil := strconv.ParseInt(args[4], 10, 64)
		rtt, errRTT := time.ParseDuration(args[6])
		j, err := openJournal(filepath.Join(dir, id+journalExt))
		if err := errors.Join(errSeed, errNumber, errUntil, errRTT, err); err != nil {
			return err
		}
		// The server may be down or paused.
		c := connectBy(until, addr, redlatch.WithTracerProvider(tracing{journal: j}))
		direct := connectBy(until, args[5])
		patient := connectBy(until, args[5], redlatch.WithTracerProvider(tracing{journal: j}), redlatch.WithWatchdogTimeout(patience))
		var conn rueidis.Client
		for conn == nil && clock() < until {
			conn, _ = rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true, DisableRetry: true})
		}
		if c == nil || direct == nil || patient == nil || conn == nil {
			return j.close()
		}
		w := &worker{id: id, client: c, direct: direct, patient: patient, journal: j, rtt: rtt, focus: args[7] == "true"}
		j.write(event{What: busy, At: began, Until: clock() + int64(300*time.Millisecond)}) // its first calls take several round trips
		var pulse sync.WaitGroup
		pulse.Go(func() { w.pulse(conn, until) })
		play(w, seed, number, until)
		pulse.Wait()
		c.Close()
		direct.Close()
		patient.Close()
		j.write(event{What: ended, At: clock(), Claim: id})
		return j.close()
	}
}

// hiccup is how much longer a request takes on a machine that is too busy to judge the order and the waits
// of a round.
const hiccup = 100 * time.Millisecond

// pulse pings the server until a time, and notes when the worker, its link or the server were late, or did
// not answer.
func (w *worker) pulse(conn rueidis.Client, until int64) {
	defer conn.Close()
	for clock() < until {
		at := clock()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err := conn.Do(ctx, conn.B().Ping().Build()).Error()
		cancel()
		if now := clock(); err != nil || now-at > int64(w.rtt+hiccup) {
			w.journal.write(event{What: busy, At: at, Until: now})
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// connectBy returns a client, or nil if that cannot be had before a time.
func connectBy(until int64, addr string, opts ...redlatch.Option) *redlatch.Client {
	for clock() < until {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		c, err := connect(ctx, addr, opts...)
		cancel()
		if err == nil {
			return c
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

// contend acquires and releases the round's locks in every way, in several goroutines.
func contend(w *worker, seed, number uint64, until int64) {
	var wg sync.WaitGroup
	for g := range times * goroutines {
		wg.Go(func() {
			p := player{worker: w, rng: rand.New(rand.NewPCG(seed, number*uint64(times*goroutines)+uint64(g)))}
			i := g % (len(kinds) + 1) // one kind, so that no other is idle while it is held
			focus := focusOf(seed)
			few := w.focus && focus != nil
			if g >= goroutines && !(few && i < len(kinds) && kinds[i].slow) {
				return
			}
			if few && i < len(kinds) && !slices.Contains(focus, kinds[i].name) {
				return
			}
			if i == len(kinds) {
				p.countLatches(seed, until)
				return
			}
			p.kind, p.locks = kinds[i].name, strings.Join(locksOf(seed, i), ",")
			k := kinds[i]
			p.leases, p.long, p.slow = !k.forever, cmp.Or(k.long, 1), k.slow
			for clock() < until {
				switch {
				case k.quick:
					p.repeat(k.of(w.patient, seed), number)
				case k.detach:
					p.leave(k.of(w.client, seed), k.of(w.direct, seed))
				case k.common:
					p.play(k.of(w.client, seed), w.owner())
				case p.chance(k.named):
					p.play(k.of(w.client, seed), w.client.NewOwner())
				default:
					p.play(k.of(w.client, seed), lock.Owner{})
				}
				if p.kind == "permits" && p.chance(1) {
					p.oversize(seed)
				}
			}
		})
	}
	wg.Wait()
}

func connect(ctx context.Context, addr string, opts ...redlatch.Option) (*redlatch.Client, error) {
	opts = append([]redlatch.Option{redlatch.WithWatchdogTimeout(watchdogTimeout)}, append(opts, redlatch.WithLogger(slog.New(slog.DiscardHandler)))...)
	return redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, opts...)
}

// worker is the state shared by the goroutines of a process.
type worker struct {
	id      string
	client  *redlatch.Client
	direct  *redlatch.Client // without the link, like another process on a machine of its own
	journal *journal
	patient *redlatch.Client // as direct, with long leases
	focus   bool             // whether the seed says which kinds there are
	rtt     time.Duration
	claims  atomic.Int64

	mu    sync.Mutex
	as    lock.Owner
	since int64
}

// ownerTime is how long the goroutines of a worker act as one owner. The holds of an owner may overlap
// for ever otherwise.
const ownerTime = 300 * time.Millisecond

// owner returns the owner as which all goroutines of the worker act for a while.
func (w *worker) owner() lock.Owner {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := clock(); w.as.IsZero() || now-w.since > int64(ownerTime) {
		w.as, w.since = w.client.NewOwner(), now
	}
	return w.as
}

// player is one goroutine of a worker.
type player struct {
	*worker
	rng         *rand.Rand
	kind, locks string // for the journal
	leases      bool   // whether holds have one
	long        int    // of 100 holds
	slow        bool
}

func (p *player) chance(percent int) bool { return p.rng.IntN(100) < percent }

func (p *player) between(from, to time.Duration) time.Duration {
	return from + time.Duration(p.rng.Int64N(int64(to-from)))
}

// taken is a hold and its claim in the journal.
type taken struct {
	lock.Hold
	claim string
	fixed bool
}

// play acquires a lock once, or several times if the owner is named, holds it and releases it.
func (p *player) play(l lock.Locker, owner lock.Owner) {
	ctx, depth := context.Background(), 1
	if !owner.IsZero() {
		ctx, depth = lock.WithOwner(ctx, owner), 1+p.rng.IntN(maxDepth)
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
	opts := p.terms()
	if p.chance(20) {
		h, err := p.acquire(ctx, l, harness.Take(l, true), 0, opts)
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

// terms returns the options of an acquisition that say how long the hold lasts: some fixed leases are
// shorter than a pause of the machine, and some are longer than the watchdog timeout.
func (p *player) terms() []lock.Option {
	if !p.leases {
		return nil
	}
	far := 3 * p.rtt
	switch n := p.rng.IntN(100); {
	case n < 30:
		return []lock.Option{lock.Lease(far + p.between(5*time.Millisecond, 60*time.Millisecond))}
	case n < 35:
		return []lock.Option{lock.Lease(far + p.between(60*time.Millisecond, watchdogTimeout))}
	case n < 40:
		return []lock.Option{lock.Lease(p.between(watchdogTimeout, 5*watchdogTimeout/2))}
	case n < 45:
		return []lock.Option{lock.MaxHold(far + p.between(5*time.Millisecond, watchdogTimeout))}
	}
	return nil
}

type call func(context.Context, ...lock.Option) (lock.Hold, error)

// acquire calls Lock or TryLock.
func (p *player) acquire(ctx context.Context, l lock.Locker, call call, wait time.Duration, opts []lock.Option) (taken, error) {
	claim := fmt.Sprintf("%s#%d", p.id, p.claims.Add(1))
	e := event{What: locking, Claim: claim, Lock: p.locks, Kind: p.kind, Wait: wait, RTT: p.rtt}
	terms, err := lock.Resolve(opts...)
	if err == nil {
		e.Lease, e.MaxHold = terms.Lease, terms.MaxHold > 0
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
	t := taken{h, claim, terms.Lease > 0}
	p.look(t)
	if terms.Lease > 0 {
		p.checkLease(t, terms.Lease, e.At)
	}
	return t, nil
}

// checkLease notes a hold that has less than what is left of the lease that it has asked for since a call
// of Lock at that time.
func (p *player) checkLease(h taken, lease time.Duration, called int64) {
	has, now := h.Remaining(), clock()
	asked := watchdog.Certain(lease) - time.Duration(now-called) - time.Millisecond // for the order of the two clocks
	if has < asked && h.Context().Err() == nil {
		p.journal.write(event{What: brief, At: now, Claim: h.claim, Err: fmt.Sprintf("%v of a lease of %v are left after %v", has, lease, time.Duration(now-called))})
	}
}

// repeat acquires a lock and releases it at once. The workers after the first pause in between, so that
// the queue of a worker is empty at times, and long at others.
func (p *player) repeat(l lock.Locker, number uint64) {
	const wait = 2 * time.Second
	if h, err := p.acquire(context.Background(), l, l.Lock, wait, []lock.Option{lock.Wait(wait)}); err == nil {
		p.unlock(h)
	}
	if number > 1 {
		time.Sleep(p.between(0, 6*time.Millisecond))
	}
}

// leave acquires a lock, detaches the hold, and adopts it like another process, which the faults of the
// network do not reach. The lease outlasts each of these calls.
func (p *player) leave(l, direct lock.Locker) {
	const longest = 5 * time.Second // of Detach
	wait := p.between(0, 1500*time.Millisecond)
	h, err := p.acquire(context.Background(), l, l.Lock, wait,
		[]lock.Option{lock.Wait(wait), lock.Lease(p.between(longest+4*time.Second, longest+7*time.Second))})
	if err != nil {
		return
	}
	p.slow = true // so that most faults come before Detach
	p.hold(h)
	p.slow = false
	if p.chance(25) {
		p.unlock(h)
		return
	}
	p.journal.write(event{What: leaving, At: clock(), Claim: h.claim})
	id, err := lock.Detach(context.Background(), h.Hold, detachTime)
	p.unlocked(h, err)
	if id == "" {
		return
	}
	p.journal.write(event{What: left, At: clock(), Claim: h.claim, ID: id, Lock: p.locks})
	adopted, err := p.adopt(direct, id)
	if err != nil {
		// What Detach has left to the background goes on meanwhile.
		time.Sleep(p.between(0, 3*time.Second))
		return
	}
	p.hold(adopted)
	p.unlock(adopted)
}

// detachTime is the lease of detached holds. It is longer than what the end of a round waits for a
// lock, unless a process may have left one without noting its id.
const detachTime = 30 * time.Second

// adopt adopts a detached hold.
func (p *player) adopt(l lock.Locker, id string) (taken, error) {
	claim := fmt.Sprintf("%s#%d", p.id, p.claims.Add(1))
	p.journal.write(event{What: locking, At: clock(), Claim: claim, Lock: p.locks, Kind: p.kind, ID: id})
	h, err := l.(*rlock.Lock).Adopt(context.Background(), id)
	at := clock()
	if err != nil {
		e := event{What: notLocked, At: at, Claim: claim, Outcome: nowhere, Err: err.Error()}
		if !errors.Is(err, lock.ErrNotHeld) || errors.Is(err, lock.ErrIndeterminate) {
			e.Outcome = outcomeOfLock(err)
		}
		p.journal.write(e)
		return taken{}, err
	}
	p.journal.write(event{What: locked, At: at, Claim: claim})
	t := taken{Hold: h, claim: claim}
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
	case p.slow:
		d = p.between(10*time.Millisecond, 50*time.Millisecond)
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
		if left := h.Remaining(); h.fixed && 0 < left && left < 10*time.Millisecond {
			p.awaitEnd(h, left)
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

// awaitEnd waits for the end of a hold whose lease lasts for that long, and notes when its context ended,
// and when a timer of the same duration fired. A late machine makes both late.
func (p *player) awaitEnd(h taken, left time.Duration) {
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-h.Context().Done():
		now := clock()
		p.journal.write(event{What: late, At: now, Claim: h.claim, Until: now})
	case <-timer.C:
		fired := clock()
		select {
		case <-h.Context().Done():
			p.journal.write(event{What: late, At: clock(), Claim: h.claim, Until: fired})
		case <-time.After(silence):
		}
	}
}

func (p *player) unlock(h taken) {
	if !p.look(h) {
		p.journal.write(event{What: over, At: clock(), Claim: h.claim})
	}
	p.journal.write(event{What: unlocking, At: clock(), Claim: h.claim})
	p.unlocked(h, h.Unlock(context.Background()))
}

// unlocked notes the result of Unlock or Detach.
func (p *player) unlocked(h taken, err error) {
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
	case lost != nil && lost.Reason == lock.ReasonMaxHold:
		return maxHold
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

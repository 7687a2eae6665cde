package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

const (
	redServers = 5
	redRivals  = 3
)

// redRival has clients of all servers, each behind a gate of its own, as a process has.
type redRival struct {
	clients []*redlatch.Client
	gates   []*harness.Gate
	red     *multilock.Red
}

// redContest has rivals for one Redlock, and a spectator.
type redContest struct {
	lease     time.Duration
	servers   []*testserver.Server
	rivals    []*redRival
	spectator *redRival
	room      redRoom
}

func newRedContest(t *testing.T, program string, lease time.Duration) *redContest {
	t.Helper()
	c := &redContest{lease: lease}
	for range redServers {
		c.servers = append(c.servers, harness.Own(t, program))
	}
	for i := range redRivals + 1 {
		r := &redRival{}
		for _, s := range c.servers {
			client, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(lease), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
			r.clients, r.gates = append(r.clients, client), append(r.gates, g)
		}
		r.red = r.lock("orders", i)
		c.rivals = append(c.rivals, r)
	}
	c.spectator, c.rivals = c.rivals[redRivals], c.rivals[:redRivals]
	return c
}

// lock returns the Redlock of that name, with a different first client for each number.
func (r *redRival) lock(name string, number int) *multilock.Red {
	var members []lock.Locker
	for i := range r.clients {
		members = append(members, r.clients[(i+number)%len(r.clients)].Lock(name))
	}
	return r.clients[number].RedLock(members)
}

// longest is the longest duration of a hold.
func (c *redContest) longest() time.Duration { return c.lease + c.lease/2 }

// redRoom is what the lock guards. It notices two callers whose holds are certain at the same time.
type redRoom struct {
	mu     sync.Mutex
	inside lock.Hold
	until  time.Time            // when the hold inside is not certain any more
	works  [redRivals]int       // of each rival
	last   [redRivals]time.Time // of these
	gaps   [redRivals]time.Duration
	gap    time.Duration // the longest without any work
	unlock time.Duration // the longest call of Unlock
	errs   []error
}

// work works under the hold of a rival, and reports whether the hold had time left.
func (r *redRoom) work(t *testing.T, who int, h lock.Hold) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now() // read first, so that until is not too late
	left := h.Remaining()
	if left == 0 || h.Context().Err() != nil {
		return false
	}
	assert.False(t, r.inside != nil && r.inside != h && now.Before(r.until), "rival %d enters while another is inside", who)
	r.inside, r.until = h, now.Add(left)
	r.works[who]++
	r.gap = max(r.gap, now.Sub(slices.MaxFunc(r.last[:], time.Time.Compare)))
	r.gaps[who] = max(r.gaps[who], now.Sub(r.last[who]))
	r.last[who] = now
	return true
}

func (r *redRoom) leave(h lock.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inside == h {
		r.inside = nil
	}
}

// has returns how often each rival has worked.
func (r *redRoom) has() [redRivals]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.works
}

// begin has all rivals contend until stop is called. A long hold, of which there are so many in 1000, spans
// several renewals. A short run has fewer contenders, which sleep under the lock, to leave time for other tests.
func (c *redContest) begin(t *testing.T, seed uint64, long int) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	goroutines, rest := harness.Size(4, 16), time.Duration(harness.Size(3, 0))*time.Millisecond
	var all sync.WaitGroup
	for who, rival := range c.rivals {
		c.room.last[who] = time.Now()
		for g := range goroutines {
			all.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(who*goroutines+g)))
				for ctx.Err() == nil {
					err := c.hold(t, ctx, rng, who, rival.red, long, rest)
					if err != nil && ctx.Err() == nil && !errors.Is(err, lock.ErrLost) {
						c.room.mu.Lock()
						c.room.errs = append(c.room.errs, fmt.Errorf("rival %d: %w", who, err))
						c.room.mu.Unlock()
					}
				}
			})
		}
	}
	return func() {
		cancel()
		all.Wait()
	}
}

// hold acquires the lock, works under it, and releases it.
func (c *redContest) hold(t *testing.T, ctx context.Context, rng *rand.Rand, who int, red *multilock.Red, long int, rest time.Duration) error {
	var opts []lock.Option
	if rng.IntN(4) == 0 {
		opts = append(opts, lock.Lease(between(rng, c.lease/2, c.lease)))
	}
	h, err := red.Lock(ctx, opts...)
	if err != nil {
		return err
	}
	until := time.Now()
	if opts == nil && rng.IntN(1000) < long {
		until = until.Add(between(rng, c.lease/2, c.longest()))
	}
	for c.room.work(t, who, h) && time.Now().Before(until) && ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
	}
	time.Sleep(rest)
	c.room.leave(h)
	began := time.Now()
	err = h.Unlock(context.Background())
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	c.room.unlock = max(c.room.unlock, time.Since(began))
	return err
}

func between(rng *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(rng.Int64N(int64(to-from)))
}

// redNemesis are the faults of a server, perhaps for one rival only. Each returns what undoes it.
var redNemesis = []struct {
	name  string
	wipes bool // it must last longer than any lease
	wreck func(c *redContest, s, rival int) (undo func() error)
}{
	{"kill", true, func(c *redContest, s, _ int) func() error {
		c.servers[s].Kill()
		return c.servers[s].Restart
	}},
	{"stop", false, func(c *redContest, s, _ int) func() error {
		c.servers[s].Pause()
		return func() error { c.servers[s].Resume(); return nil }
	}},
	{"cut off", false, func(c *redContest, s, _ int) func() error {
		all := append(slices.Clone(c.rivals), c.spectator)
		for _, r := range all {
			r.gates[s].Stall()
		}
		return func() (err error) {
			for _, r := range all {
				err = errors.Join(err, r.gates[s].Open())
			}
			return err
		}
	}},
	{"cut one rival off", false, func(c *redContest, s, rival int) func() error {
		c.rivals[rival].gates[s].Stall()
		return c.rivals[rival].gates[s].Open
	}},
}

// torment has servers fail until the end, at most two at once. A server that is back counts as
// unavailable for one more lease: one renewal detects the missing member and another acquires
// it.
func (c *redContest) torment(t *testing.T, seed uint64, end time.Time) {
	var mu sync.Mutex
	away := map[int]bool{}
	var both sync.WaitGroup
	for slot := range 2 {
		both.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(1000+slot)))
			for {
				time.Sleep(between(rng, 0, c.lease/4))
				f := redNemesis[rng.IntN(len(redNemesis))]
				lasts := between(rng, c.lease/10, c.lease/3)
				if f.wipes || rng.IntN(3) == 0 {
					lasts = between(rng, c.lease+c.lease/10, c.lease+c.lease/2)
				}
				s, rival := rng.IntN(redServers), rng.IntN(redRivals)
				if time.Now().Add(lasts + c.lease).After(end) {
					return
				}
				mu.Lock()
				for away[s] {
					s = (s + 1) % redServers
				}
				away[s] = true
				mu.Unlock()
				t.Logf("%s %d/%d for %v", f.name, s, rival, lasts)
				undo := f.wreck(c, s, rival)
				time.Sleep(lasts)
				assert.NoError(t, undo())
				time.Sleep(c.lease)
				mu.Lock()
				away[s] = false
				mu.Unlock()
			}
		})
	}
	both.Wait()
}

// Holders exclude each other while two of five servers fail at any time. No call takes long, and every rival gets
// its turns.
func TestRedKeepsItsPromisesWhileServersFail(t *testing.T) {
	const (
		lease   = 2 * time.Second
		timeout = lease / 20 // for each server: the timeout that Red derives from the lease
		slack   = 3 * time.Second
	)
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		c := newRedContest(t, s.Program, lease)
		seed, end := rand.Uint64N(1_000_000), time.Now().Add(time.Duration(harness.Size(3, 6))*lease)
		t.Log("seed", seed)
		stop := c.begin(t, seed, 10)
		done := make(chan struct{})
		go func() {
			c.torment(t, seed, end)
			close(done)
		}()
		var probes sync.WaitGroup
		var locked, unlocked time.Duration
		probes.Go(func() { // nobody contends for this one
			red := c.spectator.lock("probe", 0)
			for time.Now().Before(end) {
				began := time.Now()
				h, err := red.Lock(context.Background())
				if !assert.NoError(t, err) {
					return
				}
				between := time.Now()
				assert.NoError(t, h.Unlock(context.Background()))
				locked, unlocked = max(locked, between.Sub(began)), max(unlocked, time.Since(between))
				time.Sleep(10 * time.Millisecond)
			}
		})

		var late time.Duration // the longest delay of the test itself, which shows how busy the machine is
		for over := false; !over; {
			const pause = 20 * time.Millisecond
			looked := time.Now()
			select {
			case <-done:
				over = true
			case <-time.After(pause):
				late = max(late, time.Since(looked)-pause)
			}
		}
		probes.Wait()
		stop()
		r := &c.room
		t.Logf("works %v, gaps %v %v, late %v, errors %v", r.works, r.gap, r.gaps, late, r.errs)
		bound := timeout + slack + 2*late
		assert.Less(t, locked, bound)
		assert.Less(t, unlocked, bound)
		assert.Less(t, r.unlock, bound)
		// Waiters wait for the longest hold and for members that could not be released before
		// their leases expired. After that the next holder is a matter of chance, but not for
		// long.
		assert.Less(t, r.gap, c.longest()+lease+bound)
		for who, gap := range r.gaps {
			assert.Less(t, max(gap, time.Since(r.last[who])), 5*c.longest()+bound, "rival %d", who)
		}
		// A majority is silent while the machine is busy for longer than a server has time to answer.
		if late < lease/20 {
			assert.Empty(t, r.errs)
		}
		redNothingStays(t, c.servers)
	})
}

// A holder that is cut off from a majority of the servers loses the lock. Another caller acquires it after the
// lease, and is not affected when the old holder is back.
func TestARedHolderThatIsCutOffLosesItsLock(t *testing.T) {
	const lease = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newRedContest(t, s.Program, lease)
		first, next := c.rivals[0], c.rivals[1]
		h := multiMust(t, first.red)

		// It is renewed past its first lease.
		_, err := next.red.Lock(t.Context(), lock.Wait(lease*5/4))
		harness.NotAcquired(t, err)
		require.NoError(t, h.Context().Err())

		for _, g := range first.gates[1:4] {
			g.Stall()
		}
		began := time.Now()
		theirs, err := next.red.Lock(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost, "two servers have renewed it, which is not enough")
		// The longest pause between two attempts is half a second.
		require.Less(t, time.Since(began), lease+multiSlack)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		for _, g := range first.gates[1:4] {
			require.NoError(t, g.Open())
		}
		harness.Idle(t, first.clients...)
		require.Greater(t, redExists(t, c.servers, "orders"), redServers/2)
		require.NoError(t, theirs.Context().Err())
		require.NoError(t, theirs.Unlock(t.Context()))
		redNothingStays(t, c.servers)
	})
}

// A long hold survives the failure of every server, two at a time, while others contend for
// its lock.
func TestARedHoldOutlivesItsServersOneAfterTheOther(t *testing.T) {
	const (
		lease = 5 * time.Second // two of three renewals may come to nothing on a busy machine
		// soon bounds the time until all members are held again: each renewal requests missing
		// ones and may collide with the attempt of a rival.
		soon = 3 * lease
	)
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		c := newRedContest(t, s.Program, lease)
		h := multiMust(t, c.spectator.red)
		stop := c.begin(t, 0, 0)
		complete := func() bool {
			for i, s := range c.servers {
				owners, err := testserver.Query(s.Addr, "HKEYS", "orders")
				if err != nil || len(owners) != 1 || !strings.HasPrefix(owners[0], c.spectator.clients[i].ID()) {
					return false
				}
			}
			return true
		}
		harness.Eventually(t, soon, "all members are held", complete)
		for i := range harness.Size(1, redServers) {
			one, other := c.servers[i], c.servers[(i+1)%redServers]
			one.Kill()
			other.Pause()
			time.Sleep(lease + lease/10) // a server that has lost its data stays down until all leases have expired
			require.NoError(t, one.Restart())
			other.Resume()
			harness.Eventually(t, soon, "all members are held again", func() bool { return complete() || h.Context().Err() != nil })
			require.NoError(t, context.Cause(h.Context()))
		}
		require.Zero(t, c.room.has())

		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, 5*lease, "the others make progress", func() bool { return c.room.has() != [redRivals]int{} })
		stop()
		redNothingStays(t, c.servers)
	})
}

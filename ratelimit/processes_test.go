//go:build unix

package ratelimit_test

import (
	"context"
	"fmt"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

// workers are what processes of this test program do. Their first argument is the URL of the server.
var workers = map[string]func(args []string) error{"load": loadWorker, "wait": waitWorker}

// spawnTime is how long a process may take to begin, on a busy machine.
const spawnTime = 30 * time.Second

// loadWorker acquires permits until it is killed, and says so once it has one.
func loadWorker(args []string) error {
	c, err := redlatch.Open(context.Background(), args[0])
	if err != nil {
		return err
	}
	if err := c.RateLimiter(key).Acquire(context.Background(), 1); err != nil {
		return err
	}
	fmt.Println("acquired")
	load(context.Background(), []*redlatch.Client{c}, 3)()
	return nil
}

// waitWorker waits for the permits that are its second argument.
func waitWorker(args []string) error {
	c, err := redlatch.Open(context.Background(), args[0])
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	return c.RateLimiter(key).Acquire(context.Background(), n)
}

// Processes are killed and stopped, and the server forgets the scripts. No window has more permits than the rate,
// and others wait no longer than the turns of the dead.
func TestProcessesWithFaults(t *testing.T) {
	const rate, per = 100, 500 * time.Millisecond
	// A waiter here comes after a turn of each process. That of a dead one lasts for a pause between two attempts,
	// and half a second.
	const patience = 4*per + 2*(5*per/2+ratelimit.TurnGrace) + 5*time.Second
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key)
		setRate(t, l, rate, per)
		h := history{}
		stop := monitor(t, s, h.add)
		var all []*harness.Process
		begin := func() *harness.Process {
			p := harness.Spawn(t, "load", s.URL())
			require.Equal(t, "acquired", p.Line(spawnTime))
			all = append(all, p)
			return p
		}
		// patient acquires permits for a while, here.
		longest := time.Duration(0)
		patient := func(d time.Duration) {
			t.Helper()
			for began := time.Now(); time.Since(began) < d; {
				asked := time.Now()
				require.NoError(t, l.Acquire(t.Context(), 10, lock.Wait(patience)))
				longest = max(longest, time.Since(asked))
			}
		}

		begin()
		stopped, killed := begin(), begin()
		for range harness.Size(1, 10) {
			patient(per)
			harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
			stopped.Signal(syscall.SIGSTOP)
			patient(per)
			killed.Kill()
			patient(4 * per)
			stopped.Signal(syscall.SIGCONT)
			killed = begin()
			patient(2 * per)
		}
		for _, p := range all {
			p.Kill()
		}
		harness.Idle(t, c)
		stop()
		t.Logf("%.2f%% of the rate, and %v at most for 10 permits", 100*h.pace().requireLimit(t, rate, per), longest)
		requireSound(t, s, rate)
	})
}

// A process that is killed or stopped while it has the turn delays others for the rest of its turn. When it goes
// on, it waits as before.
func TestProcessWithTurn(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for what, row := range map[string]struct {
			begin, goOn func(p *harness.Process)
		}{
			"killed": {(*harness.Process).Kill, nil},
			"stopped": {
				func(p *harness.Process) { p.Signal(syscall.SIGSTOP) }, func(p *harness.Process) { p.Signal(syscall.SIGCONT) },
			},
		} {
			harness.Do(t, s.Addr, "FLUSHALL")
			c := harness.Client(t, s)
			l := c.RateLimiter(key)
			setRate(t, l, 5, long)
			require.NoError(t, l.TryAcquire(t.Context(), 1))
			p := harness.Spawn(t, "wait", s.URL(), "5")
			hasTurn := func() bool { return harness.Do(t, s.Addr, "EXISTS", wire.RateTurn(key)) == ":1" }
			harness.Eventually(t, spawnTime, "it has the turn", hasTurn)
			time.Sleep(2 * time.Millisecond) // a request of the same millisecond is not younger
			harness.NotAcquired(t, l.TryAcquire(t.Context(), 4))
			row.begin(p)
			began := time.Now()
			require.NoError(t, l.Acquire(t.Context(), 4), what)
			require.LessOrEqual(t, time.Since(began), 6*time.Second+3*time.Second, what)
			requireFree(t, l, 0)
			rate := 5
			if row.goOn != nil {
				row.goOn(p)
				harness.Eventually(t, 10*time.Second, "it has the turn again", hasTurn)
				rate = 10
				setRate(t, l, rate, long)
				p.Ended(10 * time.Second)
				requireFree(t, l, 0)
			}
			requireSound(t, s, rate)
			p.Kill()
		}
	})
}

// A server that loses its data begins a new window. Who waits learns of it with its next attempt, after 5 s at the
// latest, and without the option Rate there is no limiter any more.
func TestDataLoss(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		for what, lose := range map[string]func(){
			"flush": func() { harness.Do(t, s.Addr, "FLUSHALL") },
			"restart": func() {
				s.Kill()
				require.NoError(t, s.Restart())
			},
		} {
			for _, opts := range [][]ratelimit.Option{{ratelimit.Rate(3, long)}, nil} {
				harness.Do(t, s.Addr, "FLUSHALL")
				c := harness.Client(t, s)
				l := c.RateLimiter(key, opts...)
				setRate(t, l, 3, long)
				require.NoError(t, l.Acquire(t.Context(), 3))
				waits := start(t, t.Context(), l, 2)
				harness.Waits(t, 1, c)
				lose()
				err := waits.EndWithin(15 * time.Second)
				if opts == nil {
					require.ErrorIs(t, err, ratelimit.ErrNotFound, what)
					harness.Idle(t, c)
					harness.NothingLeft(t, s.Addr)
					continue
				}
				require.NoError(t, err, what)
				harness.NotAcquired(t, l.TryAcquire(t.Context(), 2))
				requireFree(t, l, 1)
				requireSound(t, s, 3)
			}
		}
	})
}

// A waiter whose keys become those of something else gets an error.
func TestWrongTypeDuringWait(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, k := range []string{key, wire.RateValue(key), wire.RatePermits(key), wire.RateTurn(key)} {
			harness.Do(t, s.Addr, "FLUSHALL")
			c := harness.Client(t, s)
			l := c.RateLimiter(key)
			setRate(t, l, 3, long)
			require.NoError(t, l.TryAcquire(t.Context(), 3))
			waits := start(t, t.Context(), l, 1)
			harness.Waits(t, 1, c)
			harness.Do(t, s.Addr, "RPUSH", "list", "1")
			harness.Do(t, s.Addr, "RENAME", "list", k)
			err := waits.EndWithin(10 * time.Second)
			require.ErrorContains(t, err, "WRONGTYPE", k)
			require.NotErrorIs(t, err, lock.ErrNotAcquired, k)
			harness.Idle(t, c)
			require.Equal(t, "+list", harness.Do(t, s.Addr, "TYPE", k))
		}
	})
}

package multilock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// The lease exceeds the time limit of the check that nothing is left, so a forgotten member
// would be detected.
func TestRedProcessesIncrementACounterExactly(t *testing.T) {
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		for _, kind := range []string{"lock", "fair"} {
			t.Run(kind, func(t *testing.T) {
				runFor, seed := redxSettings(t, 500*time.Millisecond, 3*time.Second)
				w := redxStart(t, judge, false, redxJob{Kind: kind, Seed: seed, Lease: 30 * time.Second})
				w.begin()
				done := make(chan struct{})
				time.AfterFunc(runFor, func() { close(done) })
				gap, each := w.watch(done)
				w.all()
				shares := w.shares()
				reports := w.end()
				w.verdict()
				sum := 0
				for i, r := range reports {
					sum += shares[i]
					assert.Empty(t, r.Losses)
					assert.Zero(t, r.Late)
				}
				// The pause after split votes is half a second at most.
				assert.Less(t, gap, 2*time.Second+2*w.late)
				t.Logf("%.0f a second, shares %v, gaps %v %v, reports %+v", float64(sum)/runFor.Seconds(), shares, gap, each, reports)
			})
		}
	})
}

// redxProbe acquires and releases an uncontended lock until done is closed. It returns the
// longest time of each call.
func redxProbe(r *multilock.Red, done <-chan struct{}) (n int, locked, unlocked time.Duration, err error) {
	for ; ; n++ {
		select {
		case <-done:
			return n, locked, unlocked, nil
		case <-time.After(10 * time.Millisecond):
		}
		began := time.Now()
		h, err := r.Lock(context.Background())
		if err != nil {
			return n, locked, unlocked, err
		}
		between := time.Now()
		locked = max(locked, between.Sub(began))
		err = h.Unlock(context.Background())
		unlocked = max(unlocked, time.Since(between))
		if err != nil {
			return n, locked, unlocked, err
		}
	}
}

func TestRedKeepsItsPromisesWhileServersFail(t *testing.T) {
	const (
		lease   = 2 * time.Second
		timeout = lease / 20 // for each server: the timeout that Red derives from the lease
		slack   = 3 * time.Second
	)
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		runFor, seed := redxSettings(t, 3*lease, 6*lease)
		w := redxStart(t, judge, true, redxJob{Kind: "lock", Seed: seed, Lease: lease, Long: 10})
		clients, closeAll, err := redxClients(t.Context(), w.addrs(redxProcesses), redlatch.WithWatchdogTimeout(lease))
		require.NoError(t, err)
		defer closeAll()
		w.begin()

		n := &redxNemesis{w: w, lease: lease, recover: lease, end: time.Now().Add(runFor)}
		done := make(chan struct{})
		go func() {
			n.run()
			close(done)
		}()
		probed := make(chan error, 1)
		var locked, unlocked time.Duration
		go func() {
			n, lock, unlock, err := redxProbe(redxLock("lock", "probe", 0, clients), done)
			t.Logf("probe: %d times, Lock took %v at most, Unlock %v", n, lock, unlock)
			locked, unlocked = lock, unlock
			probed <- err
		}()
		gap, each := w.watch(done)
		<-done
		shares := w.shares()
		assert.NoError(t, <-probed)
		bound := timeout + slack + 2*w.late
		assert.Less(t, locked, bound)
		assert.Less(t, unlocked, bound)
		reports := w.end()
		t.Logf("%d faults: %s", len(n.log), strings.Join(n.log, ", "))
		t.Logf("shares %v, gaps %v %v, late %v, reports %+v", shares, gap, each, w.late, reports)
		w.verdict()
		require.NoError(t, errors.Join(n.errs...))
		// Waiters wait for the longest hold and for members that could not be released before
		// their leases expired. After that the next holder is a matter of chance, but not for
		// long.
		assert.Less(t, gap, w.job.longest()+lease+bound)
		for i, r := range reports {
			assert.Less(t, each[i], 5*w.job.longest()+bound, "process %d", i)
			assert.Less(t, r.Unlock, bound)
		}
	})
}

// A process without a majority of the servers in reach loses the lock, and others acquire it.
func TestRedIsLostWithoutAMajorityInReach(t *testing.T) {
	const lease = time.Second
	harness.Full(t) // TestARedHolderThatFailsLosesItsLock cuts off one
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		runFor, seed := redxSettings(t, 0, 6*time.Second)
		w := redxStart(t, judge, true, redxJob{Kind: "lock", Seed: seed, Lease: lease, Long: 500, MayFail: true})
		w.begin()
		rng := rand.New(rand.NewPCG(seed, 0))
		for end := time.Now().Add(runFor); time.Now().Before(end); {
			i := rng.IntN(redxProcesses)
			before := w.shares()
			// It holds the lock most of the time that it wants it.
			harness.Eventually(t, 10*w.job.longest(), "it holds the lock", func() bool { return w.shares()[i] > before[i] })
			away := rng.Perm(redxServers)[:redxServers/2+1]
			for _, s := range away {
				w.gates[i][s].Stall()
			}
			// Until the end of its lease and of the longest hold of another process.
			before = w.shares()
			harness.Eventually(t, 2*lease+w.job.longest()+multiSlack, "others acquire the lock", func() bool {
				shares := w.shares()
				shares[i] = before[i]
				return shares != before
			})
			time.Sleep(redxBetween(rng, 0, lease))
			for _, s := range away {
				require.NoError(t, w.gates[i][s].Open())
			}
			if harness.Do(t, judge.Addr, "LLEN", redxViolations) != ":0" {
				break
			}
		}
		reports := w.end()
		t.Logf("shares %v, reports %+v", w.shares(), reports)
		w.verdict()
	})
}

// A killed process leaves its hold to the lease; one that is stopped for longer than the lease
// loses it.
func TestRedKeepsItsPromisesWhileProcessesFail(t *testing.T) {
	const lease = time.Second
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		runFor, seed := redxSettings(t, 5*lease/2, 8*lease)
		w := redxStart(t, judge, false, redxJob{Kind: "lock", Seed: seed, Lease: lease, Long: 20, MayFail: true})
		w.begin()
		rng := rand.New(rand.NewPCG(seed, 0))
		faults := map[string]int{}
		for end := time.Now().Add(runFor); time.Now().Before(end); {
			time.Sleep(redxBetween(rng, 0, lease/5))
			i := rng.IntN(redxProcesses)
			if faults["kill"] == 0 || rng.IntN(4) == 0 {
				faults["kill"]++
				w.procs[i].Kill()
				w.spawn(i)
				continue
			}
			faults["stop"]++
			lasts := redxBetween(rng, lease/10, lease+lease/2)
			if faults["stop"] == 1 {
				lasts = lease + lease/4
			}
			w.procs[i].Signal(syscall.SIGSTOP)
			time.Sleep(lasts)
			w.procs[i].Signal(syscall.SIGCONT)
			if harness.Do(t, judge.Addr, "LLEN", redxViolations) != ":0" {
				break
			}
		}
		w.all()
		reports := w.end()
		t.Logf("%v, shares %v, reports %+v", faults, w.shares(), reports)
		w.verdict()
	})
}

// redxHold is a worker that holds the lock, works until the hold ends, and reports that.
func redxHold(args []string) error {
	var job redxJob
	if err := json.Unmarshal([]byte(args[0]), &job); err != nil {
		return err
	}
	ctx := context.Background()
	clients, closeAll, err := redxClients(ctx, job.Servers, redlatch.WithWatchdogTimeout(job.Lease))
	if err != nil {
		return err
	}
	defer closeAll()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{job.Judge}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	h, err := redxLock(job.Kind, redxName, job.Number, clients).Lock(ctx)
	if err != nil {
		return err
	}
	judge := redxJudge{conn, strconv.Itoa(job.Number)}
	if _, err := judge.work(ctx, "held", h); err != nil {
		return err
	}
	fmt.Println("holding")
	var working sync.WaitGroup
	working.Go(func() {
		for ok := true; ok && err == nil; time.Sleep(time.Millisecond) {
			ok, err = judge.work(ctx, "held", h)
		}
	})
	<-h.Context().Done()
	fmt.Printf("%q\n", fmt.Sprint(context.Cause(h.Context()))) // may span several lines
	fmt.Printf("%q\n", fmt.Sprint(h.Unlock(ctx)))
	working.Wait()
	if ok, err := judge.work(ctx, "held", h); ok || err != nil {
		return fmt.Errorf("work under a hold that is over: %v, %w", ok, err)
	}
	return err
}

// redxHolder starts a process that holds the lock.
func redxHolder(w *redxWorld) *harness.Process {
	job := w.job
	job.Servers, job.Number = w.addrs(0), 0
	text, err := json.Marshal(job)
	require.NoError(w.t, err)
	p := harness.Spawn(w.t, "red-hold", string(text))
	require.Equal(w.t, "holding", p.Line(30*time.Second))
	return p
}

// A holder that is killed, stopped for longer than its lease, or cut off from a majority of
// the servers loses the lock. Another process acquires it after the lease, and the old holder
// writes nothing after that and notices the loss if it can.
func TestARedHolderThatFailsLosesItsLock(t *testing.T) {
	const lease = 2 * time.Second
	cut := func(w *redxWorld) []*harness.Gate { return w.gates[0][1:4] }
	type row struct {
		name       string
		gates      bool
		fail, heal func(w *redxWorld, p *harness.Process)
	}
	rows := []row{
		{"killed", false, func(_ *redxWorld, p *harness.Process) { p.Kill() }, nil},
		{
			"stopped", false, func(_ *redxWorld, p *harness.Process) { p.Signal(syscall.SIGSTOP) },
			func(_ *redxWorld, p *harness.Process) { p.Signal(syscall.SIGCONT) },
		},
		{
			"cut off", true, func(w *redxWorld, _ *harness.Process) {
				for _, g := range cut(w) {
					g.Stall()
				}
			},
			func(w *redxWorld, _ *harness.Process) {
				for _, g := range cut(w) {
					require.NoError(w.t, g.Open())
				}
			},
		},
	}
	harness.EachOf(t, rows, func(r row) string { return r.name }, func(t *testing.T, judge *testserver.Server, r row) {
		w := redxStart(t, judge, r.gates, redxJob{Kind: "lock", Lease: lease})
		clients, closeAll, err := redxClients(t.Context(), w.addrs(1))
		require.NoError(t, err)
		defer closeAll()
		next := redxLock("lock", redxName, 1, clients)
		p := redxHolder(w)

		// It is renewed past its first lease.
		_, err = next.Lock(t.Context(), lock.Wait(lease*5/4))
		harness.NotAcquired(t, err)

		r.fail(w, p)
		began := time.Now()
		h, err := next.Lock(t.Context())
		require.NoError(t, err)
		// The longest pause between two attempts is half a second.
		require.Less(t, time.Since(began), lease+multiSlack)
		before := w.shares()
		require.Greater(t, before[0], 1)
		hears := func() { require.Contains(t, p.Line(5*time.Second), lock.ErrLost.Error()) }
		switch r.name {
		case "stopped":
			r.heal(w, p)
			hears()
		case "cut off":
			hears() // two servers have renewed it, which is not enough
			r.heal(w, p)
		}
		if r.heal != nil {
			hears() // from Unlock
			p.Ended(30 * time.Second)
		}
		require.Equal(t, before, w.shares(), "it has written after its lease")

		// The new holder is not affected.
		require.Greater(t, redExists(t, w.servers, redxName), redxServers/2)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		w.verdict()
		redNothingStays(t, w.servers)
	})
}

// A long hold survives the failure of every server, two at a time, while others contend for
// its lock.
func TestARedHoldOutlivesItsServersOneAfterTheOther(t *testing.T) {
	const (
		lease = 2500 * time.Millisecond
		// soon bounds the time until all members are held again: each renewal requests missing
		// ones and may collide with the attempt of another process.
		soon = 3 * lease
	)
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		_, seed := redxSettings(t, 0, 0)
		w := redxStart(t, judge, false, redxJob{Kind: "lock", Seed: seed, Lease: lease})
		clients, closeAll, err := redxClients(t.Context(), w.addrs(redxProcesses), redlatch.WithWatchdogTimeout(lease))
		require.NoError(t, err)
		defer closeAll()
		h, err := redxLock("lock", redxName, 0, clients).Lock(t.Context())
		require.NoError(t, err)
		w.begin()

		done := make(chan struct{})
		worked := make(chan error, 1)
		go func() {
			j := redxJudge{harness.Conn(t, judge.Addr), strconv.Itoa(redxProcesses)}
			for {
				select {
				case <-done:
					worked <- j.leave(context.Background(), "held")
					return
				case <-time.After(5 * time.Millisecond):
				}
				if ok, err := j.work(context.Background(), "held", h); err != nil || !ok {
					worked <- errors.Join(errors.New("the hold ended"), err)
					return
				}
			}
		}()
		complete := func() bool {
			for i, s := range w.servers {
				owners, err := testserver.Query(s.Addr, "HKEYS", redxName)
				if err != nil || len(owners) != 1 || !strings.HasPrefix(owners[0], clients[i].ID()) {
					return false
				}
			}
			return true
		}
		harness.Eventually(t, soon, "all members are held", complete)
		for i := 0; i < harness.Size(1, redxServers) && h.Context().Err() == nil; i++ {
			one, other := w.servers[i], w.servers[(i+1)%redxServers]
			one.Kill()
			other.Pause()
			time.Sleep(lease + lease/10) // a server that has lost its data stays down until all leases have expired
			require.NoError(t, one.Restart())
			other.Resume()
			began := time.Now()
			harness.Eventually(t, soon, "all members are held again", func() bool { return complete() || h.Context().Err() != nil })
			t.Log("complete after", time.Since(began))
		}
		require.NoError(t, context.Cause(h.Context()))
		close(done)
		require.NoError(t, <-worked)
		shares := w.shares()
		require.Equal(t, make([]int, redxProcesses), shares[:redxProcesses])
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, 5*lease, "the others make progress", func() bool { return w.shares()[0] > 0 })
		w.end()
		w.verdict()
	})
}

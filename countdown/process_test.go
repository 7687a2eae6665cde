package countdown_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

var workers = map[string]func(args []string) error{
	"wait":  waitWorker,
	"count": countWorker,
}

// waitWorker waits with many goroutines. It reports when all of them are parked and
// when all were released, with the time between the first and the last release.
func waitWorker(args []string) error {
	waiters, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.Open(ctx, "redis://"+args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	l := c.CountDownLatch(key)
	roundExpiry := make(chan error, waiters)
	for range waiters {
		go func() { roundExpiry <- l.Wait(ctx) }()
	}
	for parked(c, key) < waiters {
		time.Sleep(time.Millisecond)
	}
	fmt.Println("parked")
	var first time.Time
	for i := range waiters {
		if err := <-roundExpiry; err != nil {
			return err
		}
		if i == 0 {
			first = time.Now()
		}
	}
	fmt.Println("released", time.Since(first))
	return nil
}

// One message releases the waiters of four processes, with one read by each. A process
// that was killed while it waited leaves no state.
func TestOneMessageReleasesAllProcesses(t *testing.T) {
	const processes = 4
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		waiters := strconv.Itoa(harness.Size(50, 250))
		l := harness.Client(t, s).CountDownLatch(key)
		setCount(t, l, 2)
		var all []*harness.Process
		for range processes + 1 {
			all = append(all, harness.Spawn(t, "wait", s.Addr, waiters))
		}
		for _, p := range all {
			require.Equal(t, "parked", p.Line(30*time.Second))
		}
		all[processes].Kill()
		all = all[:processes]
		countDown(t, l, 1)
		conn := harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		countDown(t, l, 0)
		for _, p := range all {
			t.Log(p.Line(10 * time.Second))
		}
		calls := harness.Commands(t, conn)
		require.Equal(t, 1, calls["publish"])
		// One script that counts, and for each process a read, and another if its safety poll
		// was due.
		require.LessOrEqual(t, calls["evalsha"], 1+2*processes)
		for _, p := range all {
			p.Ended(10 * time.Second)
		}
		nothingLeft(t, s)
	})
}

// countWorker counts down once for each part.
func countWorker(args []string) error {
	parts, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.Open(ctx, "redis://"+args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	var wg sync.WaitGroup
	errs := make(chan error, parts)
	zeros := make(chan struct{}, parts)
	for range parts {
		wg.Go(func() {
			left, err := c.CountDownLatch(key).CountDown(ctx)
			errs <- err
			if left == 0 {
				zeros <- struct{}{}
			}
		})
	}
	wg.Wait()
	for range parts {
		if err := <-errs; err != nil {
			return err
		}
	}
	fmt.Println(len(zeros))
	return nil
}

func TestProcessesCountDown(t *testing.T) {
	const processes = 4
	parts := harness.Size(100, 500)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		setCount(t, l, processes*parts+1)
		done := wait(t.Context(), l)
		var all []*harness.Process
		for range processes {
			all = append(all, harness.Spawn(t, "count", s.Addr, strconv.Itoa(parts)))
		}
		for _, p := range all {
			require.Equal(t, "0", p.Line(30*time.Second), "no process counted to zero")
			p.Ended(10 * time.Second)
		}
		requireCount(t, l, 1)
		requireWaiting(t, done)
		countDown(t, l, 0)
		requireReleased(t, done, soon)
		nothingLeft(t, s)
	})
}

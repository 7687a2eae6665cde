package once_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

var workers = map[string]func(args []string) error{"schedule": scheduleWorker, "die": dieWorker}

// scheduleWorker runs many slots one after the other, some of them late. The work writes its slot to
// the journal.
func scheduleWorker(args []string) error {
	addr, path := args[0], args[1]
	slots, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	journal, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer journal.Close()
	c, err := redlatch.Open(context.Background(), "redis://"+addr)
	if err != nil {
		return err
	}
	defer c.Close()
	o := c.Once(name)
	for i := range slots {
		time.Sleep(rand.N(10 * time.Millisecond))
		_, err := o.Run(context.Background(), once.At(time.Unix(int64(i), 0)), func(context.Context) error {
			if rand.N(4) == 0 {
				return errWork
			}
			_, err := fmt.Fprintln(journal, i)
			return err
		})
		for errors.Is(err, errWork) {
			// The next machine runs it; so does this one, if it is the last.
			_, err = o.Run(context.Background(), once.At(time.Unix(int64(i), 0)), func(context.Context) error {
				_, err := fmt.Fprintln(journal, i)
				return err
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Eight processes that start the same work at different times do it once.
func TestProcesses(t *testing.T) {
	const processes = 8
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		slots := harness.Size(30, 500)
		path := filepath.Join(t.TempDir(), "journal")
		var all []*harness.Process
		for range processes {
			all = append(all, harness.Spawn(t, "schedule", s.Addr, path, fmt.Sprint(slots)))
		}
		for _, p := range all {
			p.Ended(2 * time.Minute)
		}
		journal, err := os.ReadFile(path)
		require.NoError(t, err)
		lines := strings.Fields(string(journal))
		times := map[string]int{}
		for _, line := range lines {
			times[line]++
		}
		require.Len(t, times, slots)
		require.Len(t, lines, slots, "%v", times)
	})
}

// dieWorker runs the work and never ends it.
func dieWorker(args []string) error {
	c, err := redlatch.Open(context.Background(), "redis://"+args[0], redlatch.WithWatchdogTimeout(time.Second))
	if err != nil {
		return err
	}
	_, err = c.Once(name).Run(context.Background(), slot, func(context.Context) error {
		fmt.Println("running")
		select {}
	})
	return err
}

// The next machine runs the work of a process that has died.
func TestKilledProcess(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		p := harness.Spawn(t, "die", s.Addr)
		require.Equal(t, "running", p.Line(10*time.Second))
		c := harness.Client(t, s)
		var w counter
		next := start(t, c.Once(name), slot, w.work)
		harness.Waits(t, 1, c)
		p.Kill()
		require.NoError(t, next.EndWithin(time.Second+soon))
		require.True(t, next.Value.ran)
		require.True(t, done(t, c.Once(name), slot))
	})
}

// A process that is stopped for longer than its lease may finish the work after another has done it.
func TestStoppedProcess(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		p := harness.Spawn(t, "die", s.Addr)
		require.Equal(t, "running", p.Line(10*time.Second))
		p.Signal(syscall.SIGSTOP)
		var w counter
		require.True(t, runs(t, harness.Client(t, s).Once(name), slot, w.work, lock.Wait(time.Second+soon)))
		p.Signal(syscall.SIGCONT)
	})
}

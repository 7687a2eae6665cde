package harness

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const workerEnv = "REDLATCH_TEST_WORKER"

// runWorker runs a worker and ends the process if it was started as one.
func runWorker(workers map[string]func(args []string) error) {
	name := os.Getenv(workerEnv)
	if name == "" {
		return
	}
	work := workers[name]
	if work == nil {
		fmt.Fprintln(os.Stderr, "no worker", name)
		os.Exit(2)
	}
	if err := work(strings.Split(os.Getenv(workerEnv+"_ARGS"), "\n")); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Process is a process of the test program that runs a worker.
type Process struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines chan string
}

// Spawn starts a worker, to be killed when the test ends.
func Spawn(t testing.TB, worker string, args ...string) *Process {
	t.Helper()
	p := &Process{t: t, cmd: exec.Command(os.Args[0]), lines: make(chan string, 1024)}
	p.cmd.Env = append(os.Environ(), workerEnv+"="+worker, workerEnv+"_ARGS="+strings.Join(args, "\n"))
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		for range p.lines { // until the pipe is closed
		}
		_ = p.cmd.Wait()
	})
	return p
}

// Line returns the next line the worker prints; the test fails if none comes
// within d.
func (p *Process) Line(d time.Duration) string {
	p.t.Helper()
	select {
	case line, ok := <-p.lines:
		require.True(p.t, ok, "the worker ended without the line that was expected")
		return line
	case <-time.After(d):
		require.FailNow(p.t, "the worker printed nothing within "+d.String())
		return ""
	}
}

// Signal sends the process a signal.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(sig))
}

package harness

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

	ended chan struct{} // closed when the process has ended, with err
	err   error
}

// Spawn starts a worker, to be killed when the test ends.
func Spawn(t testing.TB, worker string, args ...string) *Process {
	t.Helper()
	p := &Process{t: t, cmd: exec.Command(os.Args[0]), lines: make(chan string, 1024), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), workerEnv+"="+worker, workerEnv+"_ARGS="+strings.Join(args, "\n"))
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		for range p.lines { // until the pipe is closed
		}
		<-p.ended
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

// Signal sends the process a signal, unless it has ended. After SIGSTOP it blocks until
// every thread of the process has stopped.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(p.t, err)
	}
	if sig == syscall.SIGSTOP {
		Eventually(p.t, 10*time.Second, "the process has stopped", p.stopped)
	}
}

// stopped reports whether no thread of the process runs.
func (p *Process) stopped() bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
	require.NoError(p.t, err)
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		// "<id> (<name>) <state> ..."; T is stopped, Z has ended.
		_, state, _ := strings.Cut(string(stat), ") ")
		if err == nil && !strings.HasPrefix(state, "T") && !strings.HasPrefix(state, "Z") {
			return false
		}
	}
	return true
}

// Ended waits until the worker has ended by itself. The test fails if that takes
// longer than d, with the worker's goroutines on the standard error, or if the
// worker failed.
func (p *Process) Ended(d time.Duration) {
	p.t.Helper()
	select {
	case <-p.ended:
		require.NoError(p.t, p.err, "the worker")
	case <-time.After(d):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT)
		select {
		case <-p.ended:
		case <-time.After(5 * time.Second):
		}
		require.FailNow(p.t, "the worker did not end within "+d.String())
	}
}

// Kill ends the process at once and waits until it is gone.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.ended
}

package harness

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const workerEnv = "REDLATCH_TEST_WORKER"

// runWorker runs a worker and exits, if the process was started by Spawn.
func runWorker(workers map[string]func(args []string) error) {
	name := os.Getenv(workerEnv)
	if name == "" {
		return
	}
	work := workers[name]
	if work == nil {
		fmt.Fprintln(os.Stderr, "unknown worker", name)
		os.Exit(2)
	}
	go func() { // the test process was killed if its end of the pipe is closed
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	if err := work(strings.Split(os.Getenv(workerEnv+"_ARGS"), "\n")); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Process is a process that runs a worker.
type Process struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines chan string

	ended chan struct{} // closed when the process has ended and err is set
	err   error
}

// Spawn starts a worker. The end of the test kills it.
func Spawn(t testing.TB, worker string, args ...string) *Process {
	t.Helper()
	p := &Process{t: t, cmd: exec.Command(os.Args[0]), lines: make(chan string, 1024), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), workerEnv+"="+worker, workerEnv+"_ARGS="+strings.Join(args, "\n"))
	p.cmd.Stderr = t.Output() // such as the report of a race
	_, err := p.cmd.StdinPipe()
	require.NoError(t, err)
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

// Line returns the next line that the worker prints. The test fails if there is none within d.
func (p *Process) Line(d time.Duration) string {
	p.t.Helper()
	select {
	case line, ok := <-p.lines:
		require.True(p.t, ok, "the worker ended without the expected line")
		return line
	case <-time.After(d):
		require.FailNow(p.t, "the worker printed nothing within "+d.String())
		return ""
	}
}

// Ended waits until the worker has ended. The test fails if the worker fails, or if that takes longer
// than d; then the goroutines of the worker are printed to the standard error.
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

// Kill kills the process and waits until it has ended.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

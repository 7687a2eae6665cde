package supervise_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/supervise"
)

// lease is a lease of an hour, until it has another end.
type lease struct {
	ctx context.Context
	end atomic.Pointer[time.Time]
}

func (l *lease) Context() context.Context { return l.ctx }

func (l *lease) Remaining() time.Duration {
	if end := l.end.Load(); end != nil {
		return time.Until(*end)
	}
	return time.Hour
}

func (l *lease) endIn(d time.Duration) (end time.Time) {
	end = time.Now().Add(d)
	l.end.Store(&end)
	return end
}

// A command that has stopped does not go on if the lease is over by then.
func TestContinuedTooLate(t *testing.T) {
	// With a terminal, this process would stop together with the command.
	const alone = "REDLATCH_TEST_ALONE"
	if os.Getenv(alone) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestContinuedTooLate$")
		cmd.Env = append(os.Environ(), alone+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		return
	}
	stdout, w, err := os.Pipe()
	require.NoError(t, err)
	defer stdout.Close()
	cmd := exec.Command("sh", "-c", `echo $$; kill -STOP $$; echo continued`)
	cmd.Stdout = w
	l := &lease{ctx: t.Context()}
	go func() {
		pid := make([]byte, 20)
		n, _ := stdout.Read(pid)
		stat := "/proc/" + strings.TrimSpace(string(pid[:n])) + "/stat"
		for state := []byte(nil); !strings.Contains(string(state), ") T "); state, _ = os.ReadFile(stat) {
			time.Sleep(time.Millisecond)
		}
		l.endIn(100 * time.Millisecond)
		_ = syscall.Kill(os.Getpid(), syscall.SIGCONT)
	}()
	result, err := supervise.Run(cmd, l, supervise.Bounds{Grace: time.Second}, nil)
	require.NoError(t, err)
	require.ErrorIs(t, result.Lost, supervise.ErrExpires)
	require.Equal(t, syscall.SIGKILL, result.State.Signal())
	w.Close()
	rest, err := io.ReadAll(stdout)
	require.NoError(t, err)
	require.Empty(t, string(rest))
}

// The grace time of a command that ignores SIGTERM does not exceed the rest of the lease.
func TestKilledBeforeTheEnd(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	l, end, lost := &lease{ctx: ctx}, make(chan time.Time, 1), errors.New("lost")
	stdout, w, err := os.Pipe()
	require.NoError(t, err)
	defer stdout.Close()
	defer w.Close()
	cmd := exec.Command("sh", "-c", `trap '' TERM; echo ready; while :; do sleep 0.01; done`)
	cmd.Stdout = w
	go func() {
		_, _ = stdout.Read(make([]byte, 10))
		end <- l.endIn(2 * time.Second)
		cancel(lost)
	}()

	result, err := supervise.Run(cmd, l, supervise.Bounds{Grace: 5 * time.Second}, nil)
	require.NoError(t, err)
	require.Equal(t, syscall.SIGKILL, result.State.Signal())
	require.Less(t, time.Now(), <-end)
	require.ErrorIs(t, result.Lost, lost)
}

// losing is a lease that is lost while it is looked at for the second time.
type losing struct {
	lease
	lose  func()
	looks int
}

func (l *losing) Remaining() time.Duration {
	if l.looks++; l.looks == 2 {
		l.lose()
	}
	return l.lease.Remaining()
}

// The command has its grace time although the loss is noticed in two ways.
func TestGraceTime(t *testing.T) {
	stdout, w, err := os.Pipe()
	require.NoError(t, err)
	defer stdout.Close()
	defer w.Close()
	cmd := exec.Command("sh", "-c", `trap 'sleep 0.1; exit 7' TERM; echo ready; while :; do sleep 0.01; done`)
	cmd.Stdout = w
	ctx, cancel := context.WithCancel(t.Context())
	l := &losing{lease: lease{ctx: ctx}, lose: func() {
		_, _ = stdout.Read(make([]byte, 10))
		cancel()
	}}

	result, err := supervise.Run(cmd, l, supervise.Bounds{Grace: time.Minute}, nil)
	require.NoError(t, err)
	require.ErrorIs(t, result.Lost, context.Canceled)
	require.Equal(t, 7, result.State.ExitStatus())
}

// Processes that may not be signalled are reported, whether the command is one of them or has left them behind.
func TestLeft(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can start a process that this one may not signal")
	}
	const within = "REDLATCH_TEST_LEFT" // a file: the command ends when it is not empty
	if os.Getenv(within) == "" {
		for _, name := range []string{"ends", "goes on"} {
			cmd := exec.Command(os.Args[0], "-test.run=^TestLeft$")
			cmd.Env = append(os.Environ(), within+"="+filepath.Join(t.TempDir(), name))
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
		}
		return
	}

	file, err := os.Create(os.Getenv(within))
	require.NoError(t, err)
	defer file.Close()
	ends := filepath.Base(file.Name()) == "ends"
	stdout, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	cmd := exec.Command("sh", "-c", `trap 'echo got TERM' TERM
		(trap '' TERM; echo ready; exec sleep 30 >&-) &
		while [ ! -s "$0" ]; do sleep 0.01; done
		exit 7`, file.Name())
	cmd.Stdout = w
	ctx, cancel := context.WithCancelCause(t.Context())
	lost := errors.New("lost")
	go func() {
		output := bufio.NewScanner(stdout)
		output.Scan()
		cancel(lost)
		output.Scan() // got TERM
		_ = syscall.Setuid(65534)
		if ends {
			_, _ = file.WriteString("end")
		}
	}()

	result, err := supervise.Run(cmd, &lease{ctx: ctx}, supervise.Bounds{Grace: 2 * time.Second}, nil)
	_, _ = file.WriteString("end")
	require.NoError(t, err)
	require.ErrorIs(t, result.Lost, lost)
	require.True(t, result.Left)
	require.Equal(t, ends, result.State.ExitStatus() == 7)
}

package supervise_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
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
	result, err := supervise.Run(cmd, l, time.Second, nil)
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

	result, err := supervise.Run(cmd, l, 5*time.Second, nil)
	require.NoError(t, err)
	require.Equal(t, syscall.SIGKILL, result.State.Signal())
	require.Less(t, time.Now(), <-end)
	require.ErrorIs(t, result.Lost, lost)
}

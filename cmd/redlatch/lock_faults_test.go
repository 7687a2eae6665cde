package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// ticker is a script that prints its process id and works, with a file "work" that grows.
func ticker(t testing.TB) (script, work string) {
	work = filepath.Join(t.TempDir(), "work")
	return "echo >>" + work + "; echo $$; while :; do echo >>" + work + "; sleep 0.01; done", work
}

func sizeOf(t testing.TB, file string) int64 {
	t.Helper()
	info, err := os.Stat(file)
	require.NoError(t, err)
	return info.Size()
}

// If the release fails, redlatch exits with the status of the command.
func TestLockOfServerThatIsGone(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := start(t, s.Addr, sh("trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done")...)
		require.Equal(t, "ready", c.line())
		s.Kill()
		c.signal(syscall.SIGTERM)
		require.Equal(t, 7, c.status(3*patience))
		require.Contains(t, c.stderr.String(), "redlatch: outcome unknown: unlock")
	})
}

// While redlatch alone is stopped the command goes on, and ends when redlatch continues too late.
func TestLockOfStoppedParent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		script, _ := ticker(t)
		c := start(t, s.Addr, sh("trap 'echo got TERM' TERM; "+script, "--ttl", "3s")...)
		pid := c.line()
		c.signal(syscall.SIGSTOP)
		require.Equal(t, "true", line(t, s, sh("echo true", "--wait", "9s")...))
		require.True(t, isAlive(pid))
		c.signal(syscall.SIGCONT)
		require.Equal(t, statusLost, c.status(patience))
		require.False(t, isAlive(pid))
		_, more := <-c.lines
		require.False(t, more, "there is no time for SIGTERM")
	})
}

// Without a terminal, SIGTSTP and SIGCONT are for the command, and redlatch renews the lock.
func TestLockOfStoppedCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		script, work := ticker(t)
		// A dash that is starting a process does not stop.
		c := newCommand(t, s.Addr, "lock", "--ttl", "9s", "job", "--", "bash", "-c", "trap 'echo continued' CONT; "+script)
		c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		c.start()
		pid := c.line()
		for range 2 {
			c.signal(syscall.SIGTSTP)
			harness.Eventually(t, patience, "the command has stopped", func() bool { return isStopped(pid) })
			size := sizeOf(t, work)
			awaitRenewal(t, s)
			require.Equal(t, size, sizeOf(t, work))
			c.signal(syscall.SIGCONT)
			require.Equal(t, "continued", c.line())
			harness.Eventually(t, patience, "the command works", func() bool { return sizeOf(t, work) > size })
		}
		c.end()
	})
}

// A stopped command is continued to handle the loss of the lock.
func TestLockLostByStoppedCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCommand(t, s.Addr, sh("trap 'echo got TERM; exit' TERM; echo $$; kill -STOP $$", "--ttl", "12s")...)
		c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		c.start()
		pid := c.line()
		harness.Eventually(t, patience, "the command has stopped", func() bool { return isStopped(pid) })
		harness.Do(t, s.Addr, "DEL", "job")
		require.Equal(t, "got TERM", c.line())
		require.Equal(t, statusLost, c.status(patience))
	})
}

// A signal that redlatch inherits as ignored stays ignored, also by the command.
func TestLockWithIgnoredSignals(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCommand(t, s.Addr)
		c.cmd = exec.Command("sh", "-c", `trap '' HUP TSTP WINCH; exec "$0" lock job -- sh -c 'trap "echo got USR1" USR1; echo $$; while :; do sleep 0.01; done'`, os.Args[0])
		c.cmd.Env = newCommand(t, s.Addr).cmd.Env
		c.start()
		pid := c.line()
		for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGTSTP, syscall.SIGWINCH, syscall.SIGUSR1} {
			c.signal(sig)
		}
		require.Equal(t, "got USR1", c.line())
		require.False(t, isStopped(pid))
		c.end()
	})
}

// The command learns of a new size of the terminal even if redlatch is in the foreground.
func TestLockForwardsResizing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh("trap 'echo got WINCH' WINCH; echo ready; while :; do sleep 0.01; done")...)
		require.Equal(t, "ready", c.line())
		c.signal(syscall.SIGWINCH)
		require.Equal(t, "got WINCH", c.line())
		c.end()
	})
}

// The standard files may be closed, and readers may have gone.
func TestLockWithoutFiles(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for script, want := range map[string]int{
			`exec "$0" lock job -- sh -c 'exit 7' <&- >&- 2>&-`:  7,
			`exec "$0" lock job -- no-such-command <&- >&- 2>&-`: statusNotFound,
		} {
			c := newCommand(t, s.Addr)
			c.cmd = exec.Command("sh", "-c", script, os.Args[0])
			c.cmd.Env = newCommand(t, s.Addr).cmd.Env
			c.start()
			require.Equal(t, want, c.status(patience), script)
		}
		r, w, err := os.Pipe()
		require.NoError(t, err)
		defer w.Close()
		r.Close()
		defer unlock(t, takeJob(t, s))
		c := newCommand(t, s.Addr, sh("true", "--try")...)
		c.cmd.Stderr = w
		c.start()
		require.Equal(t, statusNotAcquired, c.status(patience))
	})
}

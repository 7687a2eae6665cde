package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

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
		require.Contains(t, c.stderr.String(), "redlatch: outcome unknown: release")
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

// dropsPrivileges names a file. When it exists, the command becomes one of a user without privileges, so that it may
// not signal what it has started: as if that had become root by sudo.
const dropsPrivileges = "REDLATCH_TEST_DROPS_PRIVILEGES"

const nobody = 65534

func dropPrivileges(trigger string) {
	for {
		if _, err := os.Stat(trigger); err == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := syscall.Setuid(nobody); err != nil {
		panic(err)
	}
}

// unprivilegedCommand is a redlatch that may not signal the command that it runs.
type unprivilegedCommand struct {
	*command
	pid string // of a child of the command
}

// unprivileged returns a redlatch that holds the lock "job" and may not signal its command.
func unprivileged(t testing.TB, s *testserver.Server, flags ...string) unprivilegedCommand {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can start a process that redlatch may not signal")
	}
	trigger := filepath.Join(t.TempDir(), "trigger")
	c := newCommand(t, s.Addr, sh("sleep 60 & echo $!; wait", flags...)...)
	c.cmd.Env = append(c.cmd.Env, dropsPrivileges+"="+trigger)
	c.start()
	pid := c.line()
	t.Cleanup(func() { kill(t, pid) })
	require.NoError(t, os.WriteFile(trigger, nil, 0o600))
	return unprivilegedCommand{c, pid}
}

// A command that goes on does not hold up redlatch, and the lock is left to its lease.
func TestLockLostByCommandOfAnotherUser(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := unprivileged(t, s, "--max-hold", "3s", "--ttl", "1h")
		require.Equal(t, statusLeft, c.status(patience))
		require.Contains(t, c.stderr.String(), "sudo redlatch lock): --max-hold 3s is over\n")
		require.Positive(t, harness.PTTL(t, s.Addr, "job"))
	})
}

// container returns a redlatch that is process 1 of a namespace of processes, as in a container.
func container(t testing.TB, s *testserver.Server, args ...string) *command {
	t.Helper()
	unshare := []string{"--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"}
	if out, err := exec.Command("unshare", append(unshare, "true")...).CombinedOutput(); err != nil {
		t.Skipf("this machine does not permit namespaces: unshare: %v: %s", err, out)
	}
	c := newCommand(t, s.Addr)
	env := c.cmd.Env
	c.cmd = exec.Command("unshare", append(append(unshare, os.Args[0]), args...)...)
	c.cmd.Env, c.cmd.Stderr, c.cmd.WaitDelay = env, &c.stderr, time.Second
	return c
}

// As process 1, redlatch ends like any other process: its status tells of a signal that cannot end process 1, and the
// loss of the lock ends everything.
func TestLockAsProcessOne(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const script = `trap '' TERM; (while :; do sleep 0.01; done) & echo ready; wait`
		c := container(t, s, sh(script, "--ttl", "3s")...)
		c.start()
		require.Equal(t, "ready", c.line())
		harness.Do(t, s.Addr, "DEL", "job")
		require.Equal(t, statusLost, c.status(patience))
		_, more := <-c.lines
		require.False(t, more)

		l := harness.Client(t, s).FairLock("job")
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		defer unlock(t, h)
		c = container(t, s, sh("true", "--kind", "fair")...)
		c.start()
		harness.Eventually(t, patience, "redlatch waits", queued(t, l, 1))
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", c.cmd.Process.Pid))
		require.NoError(t, err)
		one, err := strconv.Atoi(strings.TrimSpace(string(children)))
		require.NoError(t, err)
		require.NoError(t, syscall.Kill(one, syscall.SIGINT))
		require.Equal(t, statusSignal+int(syscall.SIGINT), c.status(patience))
	})
}

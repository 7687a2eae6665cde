package main

import (
	"fmt"
	"os"
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

// comparison has what docs/reference/redlatch-lock.md promises in each row of its comparison.
var comparison = []struct {
	row  string
	test func(t *testing.T, s *testserver.Server)
}{
	{"scope", onConflict},
	{"wait", func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FairLock("job")
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		waiter := start(t, s.Addr, sh("true", "--kind", "fair")...)
		harness.Eventually(t, patience, "redlatch waits", queued(t, l, 1))
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--kind", "fair", "--wait", "1s")...))
		unlock(t, h)
		require.Zero(t, waiter.status(patience))
	}},
	{"try", onConflict},
	{"status on conflict", onConflict},
	{"status of the command", func(t *testing.T, s *testserver.Server) {
		for _, want := range []int{0, 1, 2, 77, 255} {
			require.Equal(t, want, exitStatus(t, s, "lock", "job", "--", "bash", "-c", `exit "$1"`, "sh", strconv.Itoa(want)))
		}
	}},
	{"status after a signal", func(t *testing.T, s *testserver.Server) {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL, syscall.SIGTERM} {
			require.Equal(t, 128+int(sig), exitStatus(t, s, sh("kill -"+strconv.Itoa(int(sig))+" $$")...))
		}
	}},
	{"command that cannot be run", func(t *testing.T, s *testserver.Server) {
		require.Equal(t, 126, exitStatus(t, s, "lock", "job", "--", "/etc/passwd"))
		require.Equal(t, 126, exitStatus(t, s, "lock", "job", "--", "/tmp"))
		require.Equal(t, 127, exitStatus(t, s, "lock", "job", "--", "no-such-command"))
	}},
	{"shared and exclusive", func(t *testing.T, s *testserver.Server) {
		reader := holding(t, s, "--kind", "read")
		require.Zero(t, exitStatus(t, s, sh("true", "--kind", "read", "--try")...))
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--kind", "write", "--try")...))
		reader.end()
		writer := holding(t, s, "--kind", "write")
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--kind", "read", "--try")...))
		writer.end()
	}},
	{"semaphore", func(t *testing.T, s *testserver.Server) {
		require.Regexp(t, `^[0-9a-f]{32}$`, line(t, s, sh("echo $REDLATCH_PERMIT", "--permits", "2")...))
		first, second := holding(t, s, "--permits", "2"), holding(t, s, "--permits", "2")
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--permits", "2", "--try")...))
		first.end()
		require.Zero(t, exitStatus(t, s, sh("true", "--permits", "2", "--try")...))
		second.end()
	}},
	{"several locks", func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, "lock", "a", "job", "--", "sh", "-c", "echo held; exec sleep 60")
		require.Equal(t, "held", c.line())
		for _, name := range []string{"a", "job"} {
			require.Equal(t, statusNotAcquired, exitStatus(t, s, "lock", "--try", name, "--", "true"))
		}
		c.end()
		defer unlock(t, takeJob(t, s))
		require.Equal(t, statusNotAcquired, exitStatus(t, s, "lock", "--try", "a", "job", "--", "true"))
		require.Zero(t, exitStatus(t, s, "lock", "--try", "a", "--", "true"))
	}},
	{"order of the waiters", func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FairLock("job")
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		order := filepath.Join(t.TempDir(), "order")
		var all []*command
		for n := range 4 {
			all = append(all, start(t, s.Addr, sh(fmt.Sprintf("echo %d >>%s", n, order), "--kind", "fair")...))
			harness.Eventually(t, patience, "redlatch waits", queued(t, l, n+1))
		}
		unlock(t, h)
		for _, c := range all {
			require.Zero(t, c.status(patience))
		}
		text, err := os.ReadFile(order)
		require.NoError(t, err)
		require.Equal(t, []string{"0", "1", "2", "3"}, strings.Fields(string(text)))
	}},
	{"fencing token", func(t *testing.T, s *testserver.Server) {
		for _, want := range []string{"1", "2"} {
			require.Equal(t, want, line(t, s, sh("echo $REDLATCH_TOKEN", "--kind", "fenced")...))
		}
	}},
	{"shell", func(t *testing.T, s *testserver.Server) {
		require.Equal(t, "$HOME; *", line(t, s, "lock", "job", "--", "echo", "$HOME;", "*"))
	}},
	{"standard input", func(t *testing.T, s *testserver.Server) {
		c := newCommand(t, s.Addr, "lock", "job", "--", "cat")
		c.cmd.Stdin = strings.NewReader("passed on\n")
		c.start()
		require.Equal(t, "passed on", c.line())
		require.Zero(t, c.status(patience))
	}},
	{"environment", func(t *testing.T, s *testserver.Server) {
		c := newCommand(t, s.Addr, sh("echo $REDLATCH_NAME $OWN")...)
		c.cmd.Env = append(c.cmd.Env, "OWN=value")
		c.start()
		require.Equal(t, "job value", c.line())
		require.Zero(t, c.status(patience))
	}},
	{"verbose", func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh("true")...)
		require.Zero(t, c.status(patience))
		require.Empty(t, c.stderr.String())
	}},
	{"signals", func(t *testing.T, s *testserver.Server) {
		for _, sig := range forwarded {
			c := start(t, s.Addr, sh("trap 'echo got; exit 7' "+strconv.Itoa(int(sig.(syscall.Signal)))+"; echo ready; while :; do sleep 0.01; done")...)
			require.Equal(t, "ready", c.line())
			c.signal(sig.(syscall.Signal))
			require.Equal(t, "got", c.line(), sig)
			require.Equal(t, 7, c.status(patience), sig)
		}
	}},
	{"interrupted wait", func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FairLock("job")
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		defer unlock(t, h)
		for _, sig := range forwarded {
			c := start(t, s.Addr, sh("echo started", "--kind", "fair")...)
			harness.Eventually(t, patience, "redlatch waits", queued(t, l, 1))
			c.signal(sig.(syscall.Signal))
			require.Equal(t, 128+int(sig.(syscall.Signal)), c.status(patience))
			harness.Eventually(t, patience, "redlatch has left", queued(t, l, 0))
			_, started := <-c.lines
			require.False(t, started, sig)
		}
	}},
	{"lock lost", func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh(`trap 'echo got TERM' TERM; echo $$; while :; do sleep 0.01; done`, "--ttl", "12s")...)
		pid := c.line()
		harness.Do(t, s.Addr, "DEL", "job")
		require.Equal(t, "got TERM", c.line())
		require.Equal(t, statusLost, c.status(patience))
		require.Contains(t, c.stderr.String(), "job: the command was ended: lock lost: ")
		require.False(t, isAlive(pid))
	}},
	{"outage of the server", func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		c := start(t, g.Addr, sh("echo held; while [ -d /proc/$$ ]; do sleep 0.01; done", "--ttl", "4s")...)
		require.Equal(t, "held", c.line())
		harness.Reached(t, g.Arm(harness.LoseRequest, "EVAL", 0)) // the renewal
		awaitRenewal(t, s)
		c.end()
	}},
	{"killed parent", func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, "lock", "--ttl", "2s", "job", "--", "sh", "-c", "echo $$; exec sleep 60")
		pid := c.line()
		c.signal(syscall.SIGKILL)
		harness.Eventually(t, patience, "the command is dead", func() bool { return !isAlive(pid) })
		require.Zero(t, exitStatus(t, s, sh("true")...))
	}},
	{"children of a killed parent", func(t *testing.T, s *testserver.Server) {
		const script = `echo $PPID; (trap '' TERM HUP INT; sh -c 'echo $PPID'; while :; do sleep 0.01; done) & wait`
		for _, args := range [][]string{
			sh(script),
			append([]string{"lock", "outer", "--", os.Args[0]}, sh(script)...),
		} {
			c := start(t, s.Addr, args...)
			inner, pid := c.line(), c.line()
			for _, redlatch := range []string{strconv.Itoa(c.cmd.Process.Pid), inner} {
				harness.Eventually(t, patience, "redlatch has seen the start", func() bool { return signalsItsEnd(t, redlatch) })
			}
			c.signal(syscall.SIGKILL)
			harness.Eventually(t, patience, "the child is dead", func() bool { return !isAlive(pid) })
			_, more := <-c.lines
			require.False(t, more)
			harness.Do(t, s.Addr, "DEL", "job")
		}
	}},
	{"children that outlive the command", func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh("sleep 60 >&- 2>&- & echo $!")...)
		pid := c.line()
		require.Zero(t, c.status(patience))
		require.Zero(t, exitStatus(t, s, sh("true", "--try")...))
		require.True(t, isAlive(pid))
		kill(t, pid)
		harness.Eventually(t, patience, "the child is dead", func() bool { return !isAlive(pid) })
	}},
	{"command of another user", func(t *testing.T, s *testserver.Server) {
		c := unprivileged(t, s, "--lease", "3s")
		require.Equal(t, statusLeft, c.status(patience))
		require.Contains(t, c.stderr.String(), "job: processes of the command go on, because redlatch may not signal them (")
		require.True(t, isAlive(c.pid))
	}},
	{"process 1 of a container", func(t *testing.T, s *testserver.Server) {
		const script = `orphan=$(sh -c 'sleep 0.01 >&- & echo $!')
			while [ -d /proc/$orphan ]; do sleep 0.01; done
			echo $PPID reaped
			exit 7`
		c := container(t, s, sh(script)...)
		c.start()
		require.Equal(t, "1 reaped", c.line())
		require.Equal(t, 7, c.status(patience))
	}},
	{"no parent process", func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh("echo $PPID; exec sleep 60")...)
		require.Equal(t, strconv.Itoa(c.cmd.Process.Pid), c.line())
		c.end()
	}},
	{"lock within a script", func(t *testing.T, s *testserver.Server) {
		require.Equal(t, "within", line(t, s, sh(os.Args[0]+` lock --try job -- true 2>&-; [ $? = 124 ] && echo within`)...))
	}},
	{"fixed lease", func(t *testing.T, s *testserver.Server) {
		c := holding(t, s, "--lease", "2s")
		require.Equal(t, statusLost, c.status(patience))
		require.Equal(t, "124", line(t, s, sh(os.Args[0]+` lock --try job -- true 2>&-; echo $?`, "--lease", "1h")...))
	}},
	{"limited run", func(t *testing.T, s *testserver.Server) {
		c := holding(t, s, "--max-hold", "2s")
		require.Equal(t, statusLost, c.status(patience))
		require.Contains(t, c.stderr.String(), "job: the command was ended: --max-hold 2s is over\n")
	}},
	{"minimal hold", func(t *testing.T, s *testserver.Server) {
		require.Zero(t, exitStatus(t, s, sh("true", "--at-least", "1h")...))
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--try")...))
		require.Greater(t, harness.PTTL(t, s.Addr, "job"), time.Hour.Milliseconds()-60_000)
	}},
	{"several servers", func(t *testing.T, s *testserver.Server) {
		second, third := harness.Server(t, s.Program), harness.Server(t, s.Program)
		red := "redis://" + s.Addr + ",redis://" + second.Addr + ",redis://" + third.Addr
		c := holding(t, s, "--red", red)
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--try", "--red", red)...))
		c.end()
		defer unlock(t, takeJob(t, s)) // of a minority
		require.Zero(t, exitStatus(t, s, sh("true", "--try", "--red", red)...))
	}},
}

// signalsItsEnd reports whether a process has the two ends of a pipe of which the kernel signals the end.
func signalsItsEnd(t testing.TB, pid string) bool {
	t.Helper()
	files, err := filepath.Glob("/proc/" + pid + "/fdinfo/*")
	require.NoError(t, err)
	ends := 0
	for _, file := range files {
		text, _ := os.ReadFile(file) // it may be closed by now
		_, flags, _ := strings.Cut(string(text), "flags:\t")
		flags, _, _ = strings.Cut(flags, "\n")
		if n, err := strconv.ParseInt(flags, 8, 64); err == nil && n&syscall.O_ASYNC != 0 {
			ends++
		}
	}
	return ends == 2
}

// onConflict has a program hold the lock that a command wants.
func onConflict(t *testing.T, s *testserver.Server) {
	require.Zero(t, exitStatus(t, s, sh("true", "--try")...))
	defer unlock(t, takeJob(t, s))
	require.Equal(t, 124, exitStatus(t, s, sh("exit 1", "--try")...))
	require.Equal(t, 124, exitStatus(t, s, sh("exit 1", "--wait", "1s")...))
}

func exitStatus(t testing.TB, s *testserver.Server, args ...string) int {
	t.Helper()
	return finish(t, s.Addr, args...).status
}

// line returns the line that a command prints.
func line(t testing.TB, s *testserver.Server, args ...string) string {
	t.Helper()
	return strings.TrimSuffix(succeeds(t, s.Addr, args...), "\n")
}

func TestComparison(t *testing.T) {
	type row = struct {
		row  string
		test func(t *testing.T, s *testserver.Server)
	}
	harness.EachOf(t, comparison, func(r row) string { return r.row }, func(t *testing.T, s *testserver.Server, r row) { r.test(t, s) })
}

// The document compares what TestComparison tests.
func TestComparisonIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/reference/redlatch-lock.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Comparison\n")
	require.True(t, found)
	var documented, tested []string
	for line := range strings.Lines(section) {
		if cells := strings.Split(line, "|"); len(cells) == 6 {
			documented = append(documented, strings.TrimSpace(cells[1]))
		}
	}
	for _, r := range comparison {
		tested = append(tested, r.row)
	}
	require.Equal(t, append([]string{"", "---"}, tested...), documented)
}

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// asCommand has the test program be the command.
const asCommand = "REDLATCH_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		os.Exit(run(os.Args[1:]))
	}
	// A job in the background of a script ignores signals, which the programs that tests start would inherit.
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	harness.Main(m, nil)
}

// patience is for what needs no more than some round trips and the start of a process.
const patience = 10 * time.Second

// command is a redlatch that runs.
type command struct {
	t      testing.TB
	cmd    *exec.Cmd
	lines  chan string // of the standard output
	stderr bytes.Buffer
	ended  chan struct{}
}

// newCommand returns a redlatch that uses a server.
func newCommand(t testing.TB, addr string, args ...string) *command {
	c := &command{t: t, cmd: exec.Command(os.Args[0], args...), lines: make(chan string, 100), ended: make(chan struct{})}
	// The commands that it runs get REDIS_URL too.
	c.cmd.Env = append(os.Environ(), asCommand+"=1", "REDLATCH_URL=", "REDIS_URL=redis://"+addr)
	c.cmd.Stderr = &c.stderr
	c.cmd.WaitDelay = time.Second // processes that outlive redlatch may have its standard error
	return c
}

// start starts redlatch on a server.
func start(t testing.TB, addr string, args ...string) *command {
	t.Helper()
	c := newCommand(t, addr, args...)
	c.start()
	return c
}

func (c *command) start() {
	c.t.Helper()
	stdout, w, err := os.Pipe()
	require.NoError(c.t, err)
	c.cmd.Stdout = w
	require.NoError(c.t, c.cmd.Start())
	w.Close()
	go func() {
		defer stdout.Close()
		for s := bufio.NewScanner(stdout); s.Scan(); {
			c.lines <- s.Text()
		}
		close(c.lines)
	}()
	go func() {
		_ = c.cmd.Wait()
		close(c.ended)
	}()
	c.t.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		<-c.ended
	})
}

// line returns the next line of the standard output.
func (c *command) line() string {
	c.t.Helper()
	return harness.Receive(c.t, patience, "a line", c.lines)
}

func (c *command) signal(sig syscall.Signal) {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Signal(sig))
}

// status waits for the end and returns the exit status, as a shell does.
func (c *command) status(d time.Duration) int {
	c.t.Helper()
	harness.Receive(c.t, d, "the end of redlatch", c.ended)
	if state := c.cmd.ProcessState.Sys().(syscall.WaitStatus); state.Signaled() {
		return statusSignal + int(state.Signal())
	}
	return c.cmd.ProcessState.ExitCode()
}

// end ends a command that does not handle SIGTERM.
func (c *command) end() {
	c.t.Helper()
	c.signal(syscall.SIGTERM)
	require.Equal(c.t, statusSignal+int(syscall.SIGTERM), c.status(patience))
}

// holding returns a redlatch that holds the lock "job".
func holding(t testing.TB, s *testserver.Server, flags ...string) *command {
	t.Helper()
	c := start(t, s.Addr, sh("echo held; exec sleep 60", flags...)...)
	require.Equal(t, "held", c.line())
	return c
}

// takeJob acquires the lock "job".
func takeJob(t testing.TB, s *testserver.Server) lock.Hold {
	t.Helper()
	h, err := harness.Client(t, s).Lock("job").TryLock(t.Context())
	require.NoError(t, err)
	return h
}

// awaitRenewal waits until the lease of the lock "job" becomes longer.
func awaitRenewal(t testing.TB, s *testserver.Server) {
	t.Helper()
	var last int64
	harness.Eventually(t, patience, "a renewal", func() bool {
		left := harness.PTTL(t, s.Addr, "job")
		renewed := last > 0 && left > last
		last = left
		return renewed
	})
}

func unlock(t testing.TB, h lock.Hold) {
	t.Helper()
	require.NoError(t, h.Unlock(context.Background()))
}

// queued returns a condition: that n callers wait for a fair lock.
func queued(t testing.TB, l *fairlock.Lock, n int) func() bool {
	return func() bool {
		queue, err := l.Queue(t.Context())
		return err == nil && len(queue) == n
	}
}

// kill kills a process.
func kill(t testing.TB, pid string) {
	t.Helper()
	n, err := strconv.Atoi(pid)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(n, syscall.SIGKILL))
}

// sh is a command of redlatch lock that runs a script.
func sh(script string, flags ...string) []string {
	return append(append([]string{"lock"}, flags...), "job", "--", "sh", "-c", script)
}

// isAlive reports whether a process has not ended.
func isAlive(pid string) bool {
	state, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && !strings.Contains(string(state), ") Z ")
}

func TestStatuses(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		held, err := harness.Client(t, s).Lock("held").Lock(t.Context())
		require.NoError(t, err)
		defer held.Unlock(t.Context()) //nolint:errcheck // the test is over
		for _, row := range []struct {
			status int
			stderr string
			args   []string
		}{
			{0, "", sh("exit 0")},
			{3, "", sh("exit 3")},
			{128 + 9, "", sh("kill -9 $$")},
			{statusLost, "too late to start the command", []string{"lock", "--lease", "40ms", "brief", "--", "true"}},
			{statusNotAcquired, "not acquired", []string{"lock", "--try", "held", "--", "true"}},
			{statusNotAcquired, "not acquired", []string{"lock", "--wait", "500ms", "held", "--", "true"}},
			{statusNotAcquired, "not acquired", []string{"lock", "--try", "free", "held", "--", "true"}},
			{statusNotRunnable, "permission denied", []string{"lock", "job", "--", "/etc/passwd"}},
			{statusNotFound, "not found", []string{"lock", "job", "--", "no-such-command"}},
			{statusNotFound, "not found", []string{"lock", "--try", "held", "--", "no-such-command"}},
			{statusNotFound, "no such file", []string{"lock", "job", "--", "/no/such/command"}},
			{statusFailed, "command is missing", []string{"lock", "job"}},
			{statusFailed, "name of the lock is missing", []string{"lock", "--", "true"}},
			{statusFailed, "must be one of", []string{"lock", "--kind", "reentrant", "job", "--", "true"}},
			{statusFailed, "must be at least 1", []string{"lock", "--permits", "0", "job", "--", "true"}},
			{statusFailed, "--wait -1s: must be greater than zero", []string{"lock", "--wait", "-1s", "job", "--", "true"}},
			{statusFailed, "--lease 0s: must be greater than zero", []string{"lock", "--lease", "0", "job", "--", "true"}},
			{statusFailed, "--at-least 0s: must be greater than zero", []string{"lock", "--at-least", "0", "job", "--", "true"}},
			{statusFailed, "--max-hold 0s: must be greater than zero", []string{"lock", "--max-hold", "0", "job", "--", "true"}},
			{statusFailed, "only one NAME", []string{"lock", "--permits", "2", "a", "b", "--", "true"}},
			{statusFailed, "none of the others", []string{"lock", "--try", "--wait", "1s", "job", "--", "true"}},
			{statusFailed, "none of the others", []string{"lock", "--lease", "1m", "--ttl", "1m", "job", "--", "true"}},
			{statusFailed, "none of the others", []string{"lock", "--permits", "2", "--red", "redis://h", "job", "--", "true"}},
			{statusFailed, "none of the others", []string{"lock", "--permits", "2", "--kind", "fair", "job", "--", "true"}},
			{statusFailed, "none of the others", []string{"lock", "--permits", "2", "--at-least", "1m", "job", "--", "true"}},
			{statusFailed, "invalid", []string{"lock", "", "--", "true"}},
			{statusFailed, "watchdog", []string{"lock", "--ttl", "1ms", "job", "--", "true"}},
			{statusFailed, "has no least time", []string{"lock", "--kind", "read", "--at-least", "1s", "job", "--", "true"}},
			{statusFailed, "--red: a URL is missing", sh("true", "--red", "")},
			{statusFailed, "--red: a URL is missing", sh("true", "--red", "redis://h,,redis://g")},
			{statusFailed, "--kind fenced: ", []string{"lock", "--kind", "fenced", "a", "b", "--", "true"}},
			{statusFailed, "--kind fenced: ", sh("true", "--kind", "fenced", "--red", "redis://h,redis://g,redis://i")},
			{statusFailed, "exclude", []string{"lock", "--url", "redis://h", "--red", "redis://g", "job", "--", "true"}},
			{statusFailed, "", []string{"lock", "--url", "redis://127.0.0.1:1", "job", "--", "true"}},
			{statusFailed, "unknown command", []string{"unlok"}},
		} {
			c := start(t, s.Addr, row.args...)
			require.Equal(t, row.status, c.status(patience), "%v: %s", row.args, &c.stderr)
			require.Contains(t, c.stderr.String(), row.stderr, row.args)
			if row.stderr == "" && row.status != statusFailed {
				require.Empty(t, c.stderr.String(), row.args)
			}
			_, more := <-c.lines
			require.False(t, more, "%v writes to its standard output", row.args)
		}
		require.NoError(t, held.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestEnvironment(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const script = `echo $REDLATCH_NAME/$REDLATCH_TOKEN/$REDLATCH_PERMIT`
		c := start(t, s.Addr, sh(script)...)
		require.Equal(t, "job//", c.line())
		require.Zero(t, c.status(patience))
		for token := range 2 {
			c = start(t, s.Addr, sh(script, "--kind", "fenced")...)
			require.Equal(t, fmt.Sprintf("job/%d/", token+1), c.line())
			require.Zero(t, c.status(patience))
		}
		c = start(t, s.Addr, "lock", "a", "b", "--", "sh", "-c", script)
		require.Equal(t, "a,b//", c.line())
		require.Zero(t, c.status(patience))
		c = start(t, s.Addr, "lock", "--permits", "2", "slots", "--", "sh", "-c", script)
		require.Regexp(t, `^slots//[0-9a-f]{32}$`, c.line())
		require.Zero(t, c.status(patience))
	})
}

// The command does not get the URLs, which may have passwords.
func TestCommandHasNoURL(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const script = `echo ${REDLATCH_URL-none} ${REDLATCH_RED-none} ${REDIS_URL-none}`
		url := "redis://" + s.Addr
		for _, row := range []struct {
			want string
			args []string
		}{
			{"none none other", sh(script)},
			{url + " " + url + " other", sh(script, "--keep-url")},
		} {
			c := newCommand(t, s.Addr, row.args...)
			c.cmd.Env = append(c.cmd.Env, "REDLATCH_URL="+url, "REDLATCH_RED="+url, "REDIS_URL=other")
			c.start()
			require.Equal(t, row.want, c.line())
			require.Zero(t, c.status(patience))
		}
	})
}

// REDLATCH_RED has the servers of a Redlock, for a command without another server.
func TestRedOfTheEnvironment(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		red := "REDLATCH_RED=redis://" + s.Addr + ",redis://" + unreachable + ",redis://" + unreachable
		for want, args := range map[int][][]string{
			statusFailed: {sh("true")},
			0:            {sh("true", "--url", "redis://"+s.Addr), {"lock", "--permits", "1", "slots", "--", "true"}},
		} {
			for _, a := range args {
				c := newCommand(t, s.Addr, a...)
				c.cmd.Env = append(c.cmd.Env, red)
				c.start()
				require.Equal(t, want, c.status(patience), "%v: %s", a, &c.stderr)
			}
		}
	})
}

// A name that begins with a dash is no flag.
func TestNamesWithADash(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const script = `echo $REDLATCH_NAME`
		for want, args := range map[string][]string{
			"--try":        {"lock", "--name=--try", "--", "sh", "-c", script},
			"--":           {"lock", "--name=--", "--", "sh", "-c", script},
			"--url=x,b,-c": {"lock", "--name=--url=x", "--name", "b", "--name=-c", "--", "sh", "-c", script},
			"-a,b":         {"lock", "--name=-a", "b", "--", "sh", "-c", script},
		} {
			c := start(t, s.Addr, args...)
			require.Equal(t, want, c.line())
			require.Zero(t, c.status(patience), &c.stderr)
		}
		require.Equal(t, "--force was not held\n", succeeds(t, s.Addr, "unlock", "--force", "--", "--force"))
	})
}

// The command runs while the lock is held, for each kind of lock.
func TestKinds(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range kinds {
			name := "of:" + kind
			holder := start(t, s.Addr, "lock", "--kind", kind, name, "--", "sh", "-c", "echo held; exec sleep 60")
			require.Equal(t, "held", holder.line())
			if typ := harness.Do(t, s.Addr, "TYPE", name); kind == "plain" {
				require.Equal(t, "+string", typ)
			} else {
				require.Equal(t, "+hash", typ, kind)
			}
			other := start(t, s.Addr, "lock", "--try", "--kind", kind, name, "--", "true")
			want := statusNotAcquired
			if kind == "read" {
				want = 0
			}
			require.Equal(t, want, other.status(patience), kind)
			holder.signal(syscall.SIGTERM)
			require.Equal(t, 128+15, holder.status(patience), kind)
			require.Zero(t, start(t, s.Addr, "lock", "--try", "--kind", kind, name, "--", "true").status(patience), kind)
		}
	})
}

func TestPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		flags := []string{"--permits", "2"}
		first, second := start(t, s.Addr, sh("echo held; exec sleep 60", flags...)...), start(t, s.Addr, sh("echo held; exec sleep 60", flags...)...)
		require.Equal(t, "held", first.line())
		require.Equal(t, "held", second.line())
		require.Equal(t, statusNotAcquired, start(t, s.Addr, sh("true", "--permits", "2", "--try")...).status(patience))
		third := start(t, s.Addr, sh("echo held", flags...)...)
		first.signal(syscall.SIGTERM)
		require.Equal(t, "held", third.line())
		require.Zero(t, third.status(patience))
	})
}

// Signals go to the whole group of the command, which may handle them.
func TestSignals(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh(`trap 'echo got USR1' USR1; trap 'echo got TERM; exit 7' TERM
			(trap 'echo child got USR1' USR1; echo ready; while :; do sleep 0.01; done) & while :; do wait; done`)...)
		require.Equal(t, "ready", c.line())
		c.signal(syscall.SIGUSR1)
		require.ElementsMatch(t, []string{"got USR1", "child got USR1"}, []string{c.line(), c.line()})
		c.signal(syscall.SIGTERM)
		require.Equal(t, "got TERM", c.line())
		require.Equal(t, 7, c.status(patience))
		harness.NothingLeft(t, s.Addr)
	})
}

// A signal ends the wait for the lock.
func TestSignalWhileWaiting(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, err := harness.Client(t, s).FairLock("job").Lock(t.Context())
		require.NoError(t, err)
		c := start(t, s.Addr, sh("true", "--kind", "fair")...)
		harness.Eventually(t, patience, "redlatch waits", func() bool {
			waiting, err := harness.Client(t, s).FairLock("job").Queue(t.Context())
			return err == nil && len(waiting) == 1
		})
		c.signal(syscall.SIGINT)
		require.Equal(t, 128+2, c.status(patience))
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// If redlatch is killed, the command dies too, and the lock is free when its lease is over.
func TestKilledParent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, "lock", "--ttl", "1s", "job", "--", "sh", "-c", "echo $$; exec sleep 60")
		pid := c.line()
		c.signal(syscall.SIGKILL)
		harness.Eventually(t, patience, "the command is dead", func() bool { return !isAlive(pid) })
		next := start(t, s.Addr, sh("echo held", "--wait", "11s")...)
		require.Equal(t, "held", next.line())
	})
}

// When the lock is lost the group gets TERM, and what ignores it is killed.
func TestLostLock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh(`trap 'echo got TERM; exit 0' TERM; echo ready; while :; do sleep 0.01; done`, "--ttl", "12s")...)
		require.Equal(t, "ready", c.line())
		harness.Do(t, s.Addr, "DEL", "job")
		require.Equal(t, "got TERM", c.line())
		require.Equal(t, statusLost, c.status(patience))
		require.Contains(t, c.stderr.String(), "job: the command was ended: lock lost: ")

		c = start(t, s.Addr, sh(`trap '' TERM; sleep 60 & echo $!; while :; do sleep 0.01; done`, "--ttl", "3s")...)
		pid := c.line()
		harness.Do(t, s.Addr, "DEL", "job")
		require.Equal(t, statusLost, c.status(patience))
		harness.Eventually(t, patience, "the whole group is dead", func() bool { return !isAlive(pid) })
	})
}

// What is left of the group is killed after the command.
func TestLostLockOfGroup(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, sh(`(trap '' TERM; echo ready; exec sleep 60) & echo $!; wait`, "--ttl", "3s")...)
		lines := []string{c.line(), c.line()}
		pid := lines[0]
		if pid == "ready" {
			pid = lines[1]
		}
		harness.Do(t, s.Addr, "DEL", "job")
		require.Equal(t, statusLost, c.status(patience))
		harness.Eventually(t, patience, "the child is dead", func() bool { return !isAlive(pid) })
	})
}

// Without renewals the command is dead before the lease ends on the server.
func TestStoppedServer(t *testing.T) {
	const ttl = 6 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		c := start(t, g.Addr, sh(`trap 'echo got TERM' TERM; echo $$; while :; do sleep 0.01; done`, "--ttl", ttl.String())...)
		pid := c.line()
		g.Stall()
		require.Equal(t, "got TERM", c.line())
		harness.Eventually(t, patience, "the command is dead", func() bool { return !isAlive(pid) })
		require.Positive(t, harness.PTTL(t, s.Addr, "job"), "of the lease")
		require.Equal(t, statusLost, c.status(patience))
		require.NoError(t, g.Open())
	})
}

func TestDurations(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, flags := range [][]string{{"--lease", "2s"}, {"--max-hold", "2s"}} {
			c := start(t, s.Addr, sh("echo held; exec sleep 60", flags...)...)
			require.Equal(t, "held", c.line())
			require.Equal(t, statusLost, c.status(patience), flags)
			harness.Do(t, s.Addr, "DEL", "job")
		}
		require.Zero(t, start(t, s.Addr, sh("true", "--at-least", "1h")...).status(patience))
		require.Equal(t, statusNotAcquired, start(t, s.Addr, sh("true", "--try")...).status(patience))
		left := harness.PTTL(t, s.Addr, "job")
		require.Greater(t, left, time.Hour.Milliseconds()-60_000, strconv.Itoa(int(left)))
	})
}

// The least time is for a command that has started.
func TestAtLeastOfACommandThatDoesNotStart(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o700))
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		other := harness.Server(t, s.Program)
		for _, flags := range [][]string{
			{"job"}, {"--lease", "2h", "job"}, {"--kind", "fair", "job"}, {"job", "another"}, {"--red", "redis://" + s.Addr + ",redis://" + other.Addr, "job"},
		} {
			args := slices.Concat([]string{"lock", "--at-least", "1h"}, flags, []string{"--", script})
			require.Equal(t, statusNotFound, start(t, s.Addr, args...).status(patience), flags)
			harness.NothingLeft(t, s.Addr)
			harness.NothingLeft(t, other.Addr)
		}
	})
}

func TestRed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		urls := []string{"redis://" + s.Addr}
		for range 2 {
			urls = append(urls, "redis://"+harness.Server(t, s.Program).Addr)
		}
		all := strings.Join(urls, ",")
		c := start(t, s.Addr, sh("echo held; exec sleep 60", "--red", all)...)
		require.Equal(t, "held", c.line())
		require.Equal(t, statusNotAcquired, start(t, s.Addr, sh("true", "--try", "--red", all)...).status(patience))
		c.signal(syscall.SIGTERM)
		require.Equal(t, 128+15, c.status(patience))
		harness.NothingLeft(t, s.Addr)
	})
}

// A message has a single prefix and no control characters. A loss that only the release notices is
// reported too.
func TestMessages(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		fails(t, s.Addr, statusLost, "redlatch: job: lock lost: ", sh(os.Args[0]+" unlock --force job >&-")...)
		fails(t, s.Addr, statusLost, "redlatch: red\ufffd[31m: too late ", "lock", "--lease", "40ms", "red\x1b[31m", "--", "true")
	})
}

func TestGrace(t *testing.T) {
	for _, c := range []struct {
		want time.Duration
		of   lockCommand
	}{
		{5 * time.Second, lockCommand{ttl: 30 * time.Second}},
		{10 * time.Second, lockCommand{ttl: time.Hour}},
		{time.Second, lockCommand{ttl: time.Hour, lease: 6 * time.Second}},
		{time.Second, lockCommand{ttl: time.Hour, maxHold: 6 * time.Second}},
		{time.Second, lockCommand{ttl: 6 * time.Second, maxHold: time.Hour}},
	} {
		require.Equal(t, c.want, c.of.grace())
	}
}

// REDLATCH_URL precedes REDIS_URL, and an empty variable is none.
func TestURLs(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		url := "redis://" + s.Addr
		for _, env := range [][]string{
			{"REDLATCH_URL=" + url, "REDIS_URL=redis://" + unreachable},
			{"REDLATCH_URL=", "REDIS_URL=" + url},
		} {
			c := newCommand(t, s.Addr, sh("true")...)
			c.cmd.Env = append(c.cmd.Env, env...)
			c.start()
			require.Zero(t, c.status(patience), "%v: %s", env, &c.stderr)
		}
		c := newCommand(t, unreachable, sh("true", "--url", url)...)
		c.start()
		require.Zero(t, c.status(patience), &c.stderr)
	})
}

// A majority of the servers is enough from the beginning, and it is one of all servers.
func TestRedWithoutSomeServers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const down = "redis://127.0.0.1:1"
		url := "redis://" + s.Addr
		second, third := "redis://"+harness.Server(t, s.Program).Addr, "redis://"+harness.Server(t, s.Program).Addr
		require.Zero(t, exitStatus(t, s, sh("true", "--try", "--red", url+","+down+","+second)...))
		fails(t, s.Addr, statusFailed, "connection refused", sh("true", "--try", "--red", url+","+down+","+down)...)
		fails(t, s.Addr, statusFailed, "invalid", sh("true", "--try", "--red", url+","+second+",redis//")...)

		five := strings.Join([]string{url, second, third, down, down}, ",")
		require.Zero(t, exitStatus(t, s, sh("true", "--try", "--red", five)...))
		defer unlock(t, takeJob(t, s)) // two of five are no majority
		require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--try", "--red", five)...))
	})
}

// The help lists the exit statuses and an example.
func TestHelp(t *testing.T) {
	c := start(t, "127.0.0.1:1", "lock", "--help")
	require.Zero(t, c.status(patience))
	var help strings.Builder
	for line := range c.lines {
		help.WriteString(line + "\n")
	}
	for _, want := range []string{"Exit status:", "123", "124", "125", "126", "127", "128 + n", "redlatch lock --wait 1m", "--max-hold"} {
		require.Contains(t, help.String(), want)
	}
}

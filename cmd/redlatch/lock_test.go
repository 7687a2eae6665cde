package main

import (
	"bufio"
	"bytes"
	"context"
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
		if trigger := os.Getenv(dropsPrivileges); trigger != "" {
			go dropPrivileges(trigger)
		}
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
		if c.t.Failed() {
			c.t.Logf("standard error of redlatch:\n%s", &c.stderr)
		}
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
		require.False(t, last > 0 && left == -2, "the lock is lost")
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
		defer held.Unlock(t.Context())
		for _, row := range []struct {
			status int
			stderr string
			args   []string
		}{
			{statusLost, "too late to start the command", []string{"lock", "--lease", "40ms", "brief", "--", "true"}},
			{statusNotAcquired, "not acquired", []string{"lock", "--try", "free", "held", "--", "true"}},
			{statusNotRunnable, "permission denied", []string{"lock", "job", "--", "/etc/passwd"}},
			{statusNotFound, "not found", []string{"lock", "job", "--", "no-such-command"}},
			{statusNotFound, "not found", []string{"lock", "--try", "held", "--", "no-such-command"}},
			{statusNotFound, "no such file", []string{"lock", "job", "--", "/no/such/command"}},
			{statusFailed, "invalid", []string{"lock", "", "--", "true"}},
			{statusFailed, "connection refused", []string{"lock", "--try", "--url", "redis://127.0.0.1:1", "job", "--", "true"}},
		} {
			fails(t, s.Addr, row.status, row.stderr, row.args...)
		}
		require.NoError(t, held.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// The machines that find the lock taken can end with success, and without a line that cron would mail.
func TestConflict(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		defer unlock(t, takeJob(t, s))
		fails(t, s.Addr, 7, "not acquired", sh("true", "--try", "--conflict-status", "7")...)
		for _, args := range [][]string{{"--try"}, {"--wait", "1s"}} {
			r := finish(t, s.Addr, sh("true", append(args, "--quiet", "--conflict-status", "0")...)...)
			require.Zero(t, r.status)
			require.Empty(t, r.stdout+r.stderr)
		}
		require.Equal(t, statusNotAcquired, finish(t, s.Addr, sh("true", "--try", "--quiet")...).status)

		fails(t, s.Addr, statusFailed, "--conflict-status 256: must be from 0 to 255", sh("true", "--conflict-status", "256")...)
		fails(t, s.Addr, statusFailed, "--ttl 50ms: must be at least 100ms", sh("true", "--ttl", "50ms")...)
		fails(t, unreachable, statusFailed, "connection refused", sh("true", "--try", "--quiet")...)
	})
}

// A plain lock and a spin lock are the only kinds that no row of the comparison holds.
func TestKinds(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for kind, want := range map[string]string{"plain": "+string", "spin": "+hash"} {
			holder := holding(t, s, "--kind", kind)
			require.Equal(t, want, harness.Do(t, s.Addr, "TYPE", "job"))
			require.Equal(t, statusNotAcquired, exitStatus(t, s, sh("true", "--try", "--kind", kind)...), kind)
			holder.end()
		}
	})
}

// REDLATCH_URL precedes REDIS_URL, and an empty variable is none. REDLATCH_RED has the servers of a Redlock, for a
// command without another server. The command that runs gets neither of the first and the last, which may have passwords.
func TestEnvironment(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const script = `echo ${REDLATCH_URL-none} ${REDLATCH_RED-none} ${REDIS_URL-none}`
		const none = "redis://" + unreachable
		url := "redis://" + s.Addr
		minority := "REDLATCH_RED=" + url + "," + none + "," + none
		for _, row := range []struct {
			env    []string
			args   []string
			status int
			prints string
		}{
			{[]string{"REDLATCH_URL=" + url, "REDIS_URL=" + none}, sh(script), 0, "none none " + none + "\n"},
			{[]string{"REDLATCH_URL=", "REDIS_URL=" + url}, sh(script), 0, "none none " + url + "\n"},
			{[]string{"REDIS_URL=" + none}, sh("true", "--url", url), 0, ""},
			{[]string{minority}, sh("true", "--try"), statusFailed, ""},
			{[]string{minority}, sh("true", "--wait", "300ms"), statusFailed, ""},
			{
				[]string{"REDLATCH_TOKEN=7", "REDLATCH_PERMIT=x"}, sh("echo ${REDLATCH_TOKEN-none} ${REDLATCH_PERMIT-none}"), 0,
				"none none\n",
			},
			{[]string{minority}, sh("true", "--url", url), 0, ""},
			{[]string{minority}, []string{"lock", "--permits", "1", "slots", "--", "true"}, 0, ""},
			{
				[]string{"REDLATCH_URL=" + url, "REDLATCH_RED=" + url, "REDIS_URL=other"}, sh(script, "--keep-url"), 0,
				url + " " + url + " other\n",
			},
		} {
			c := newCommand(t, s.Addr, row.args...)
			c.cmd.Env = append(c.cmd.Env, row.env...)
			c.start()
			r := c.result()
			require.Equal(t, row.status, r.status, "%v: %s", row.env, r.stderr)
			require.Equal(t, row.prints, r.stdout, "%v", row.env)
		}
	})
}

// texts receives what is written.
type texts chan string

func (w texts) Write(text []byte) (int, error) {
	w <- string(text)
	return len(text), nil
}

// The wait for the lock includes the one for a server that is down.
func TestWaitIncludesTheServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		fails(t, s.Addr, statusFailed, "WRONGPASS", sh("true", "--url", "redis://user:wrong@"+s.Addr)...)
		s.Kill()
		fails(t, s.Addr, statusFailed, "connection refused", sh("true", "--wait", "1s")...)
		c := newCommand(t, s.Addr, sh("echo held", "--wait", "1m")...)
		said := make(texts, 100)
		c.cmd.Stderr = said
		c.start()
		require.Contains(t, harness.Receive(t, patience, "a message", said), "waiting for the server")
		require.NoError(t, s.Restart())
		require.Equal(t, "held", c.line())
		require.Zero(t, c.status(patience))
	})
}

// A name is any text but the empty one. One that begins with a dash is no flag.
func TestNames(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const script = `echo "$REDLATCH_NAME"`
		for want, args := range map[string][]string{
			"--try":          {"lock", "--name=--try", "--", "sh", "-c", script},
			"--":             {"lock", "--name=--", "--", "sh", "-c", script},
			"--url=x,b,-c":   {"lock", "--name=--url=x", "--name", "b", "--name=-c", "--", "sh", "-c", script},
			"-a,b":           {"lock", "--name=-a", "b", "--", "sh", "-c", script},
			"b,a":            {"lock", "b", "a", "--", "sh", "-c", script},
			" ":              {"lock", " ", "--", "sh", "-c", script},
			`é😀}{ $HOME*'"\`: {"lock", `é😀}{ $HOME*'"\`, "--", "sh", "-c", script},
		} {
			require.Equal(t, want, line(t, s, args...))
		}
		require.Equal(t, "b a", line(t, s, "lock", "job", "echo", "b", "a"), "one name needs no --")
		require.Equal(t, "--force was not held\n", succeeds(t, s.Addr, "unlock", "--force", "--", "--force"))
		fails(t, s.Addr, statusFailed, "invalid", "lock", "a", "", "--", "true")
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

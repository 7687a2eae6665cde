package main

import (
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// The race detector sleeps for a second before a command ends with status 0.
func init() { os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")) }

// unreachable is the address of no server.
const unreachable = "127.0.0.1:1"

// result is what a redlatch has left behind.
type result struct {
	status         int
	stdout, stderr string
}

// finish runs redlatch on a server to its end.
func finish(t testing.TB, addr string, args ...string) result {
	t.Helper()
	return start(t, addr, args...).result()
}

// result waits for the end.
func (c *command) result() result {
	c.t.Helper()
	var stdout strings.Builder
	for line := range c.lines {
		stdout.WriteString(line + "\n")
	}
	return result{c.status(patience), stdout.String(), c.stderr.String()}
}

// succeeds runs redlatch, which must succeed without a warning, and returns its standard output.
func succeeds(t testing.TB, addr string, args ...string) string {
	t.Helper()
	r := finish(t, addr, args...)
	require.Zero(t, r.status, "%v: %s", args, r.stderr)
	require.Empty(t, r.stderr, args)
	return r.stdout
}

// fails runs redlatch, which must fail with that status and text, and print nothing else.
func fails(t testing.TB, addr string, status int, text string, args ...string) {
	t.Helper()
	r := finish(t, addr, args...)
	require.Equal(t, status, r.status, "%v: %s", args, r.stderr)
	require.Contains(t, r.stderr, text, args)
	require.Equal(t, 1, strings.Count(r.stderr, "\n"), "%v: %s", args, r.stderr)
	require.Empty(t, r.stdout, args)
}

// Invalid arguments are errors before anything is sent.
func TestInvalidArguments(t *testing.T) {
	id := strings.Repeat("0", 32)
	for _, row := range []struct{ text, args string }{
		{"command is missing", "lock job"},
		{"name of the lock is missing", "lock -- true"},
		{"must be one of", "lock --kind reentrant job -- true"},
		{"must be at least 1", "lock --permits 0 job -- true"},
		{"--wait -1s: must be greater than zero", "lock --wait -1s job -- true"},
		{"--lease 0s: must be greater than zero", "lock --lease 0 job -- true"},
		{"--at-least 0s: must be greater than zero", "lock --at-least 0 job -- true"},
		{"--max-hold 0s: must be greater than zero", "lock --max-hold 0 job -- true"},
		{"only one NAME", "lock --permits 2 a b -- true"},
		{"redlatch: --wait and --try exclude each other", "lock --try --wait 1s job -- true"},
		{"redlatch: --lease and --ttl exclude each other", "lock --lease 1m --ttl 1m job -- true"},
		{"redlatch: --permits and --red exclude each other", "lock --permits 2 --red redis://h job -- true"},
		{"redlatch: --permits and --kind exclude each other", "lock --permits 2 --kind fair job -- true"},
		{"redlatch: --permits and --at-least exclude each other", "lock --permits 2 --at-least 1m job -- true"},
		{"redlatch: --lease and --max-hold exclude each other", "lock --lease 1m --max-hold 1m job -- true"},
		{"--lease 1µs: must be from a millisecond to ", "lock --lease 1us job -- true"},
		{"--at-least 1µs: must be from a millisecond to ", "lock --at-least 1us job -- true"},
		{"--at-least 2m0s: must not exceed --lease 1m0s", "lock --at-least 2m --lease 1m job -- true"},
		{"--at-least 2m0s: must not exceed --max-hold 1m0s", "lock --at-least 2m --max-hold 1m job -- true"},
		{"has no least time", "lock --kind read --at-least 1s job -- true"},
		{"--red: a URL is missing", "lock --red '' job -- true"},
		{"--red: a URL is missing", "lock --red redis://h,,redis://g job -- true"},
		{"--kind fenced: ", "lock --kind fenced a b -- true"},
		{"--kind fenced: ", "lock --kind fenced --red redis://h,redis://g,redis://i job -- true"},
		{"exclude", "lock --url redis://h --red redis://g job -- true"},
		{"name of the rate limiter is missing", "rate -- true"},
		{"only one NAME", "rate a b -- true"},
		{"the command is missing", "rate a --"},
		{"--take 0: must be at least 1", "rate --take 0 a -- true"},
		{"--wait 0s: must be greater than zero", "rate --wait 0 a -- true"},
		{"--conflict-status 256: must be from 0 to 255", "rate --conflict-status 256 a -- true"},
		{"redlatch: --wait and --try exclude each other", "rate --try --wait 1s a -- true"},
		{`--rate "100": must be a number and a duration`, "rate --rate 100 a -- true"},
		{`--rate "0/1m": must be`, "rate --rate 0/1m a -- true"},
		{`--rate "1/1us": must be`, "rate --rate 1/1us a -- true"},
		{`--rate "2147483648/1m": must be`, "rate --rate 2147483648/1m a -- true"},
		{`--rate "1/m": must be`, "rate --rate 1/m a -- true"},
		{"unknown command", "frobnicate"},
		{"argument is missing: redlatch unlock", "unlock --force"},
		{"too many arguments", "unlock --force a b"},
		{"an argument is empty", "unlock --force ''"},
		{"with --force", "unlock a"},
		{"must be one of lock, fair", "unlock --force --kind multi a"},
		{"the command is missing", "permits"},
		{"unknown command", "permits show"},
		{"argument is missing", "permits set a"},
		{"must be a number from 0 to 2147483647", "permits set a -- -1"},
		{"must be a number", "permits set a 2147483648"},
		{"must be a number", "permits set a many"},
		{"too many arguments", "permits drain a b"},
		{"the id of a permit is missing", "permits release a"},
		{"32 hexadecimal digits", "permits release a " + id + " 17"},
		{"can release 10000", "permits release a" + strings.Repeat(" "+id, 10_001)},
		{"must be a number from 0 to 2147483647", "permits release --plain a -- -1"},
		{"too many arguments", "permits release --plain a 1 2"},
		{"the command is missing", "token"},
		{"unknown command", "token lower"},
		{"argument is missing: redlatch token raise NAME N", "token raise a"},
		{"must be a number from 0 to 9007199254740990", "token raise a -- -1"},
		{"must be a number", "token raise a 9007199254740991"},
		{"must be a number", "token raise a 1e3"},
		{"too many arguments", "token raise a 1 2"},
		{"the command is missing", "latch"},
		{"unknown command", "latch open"},
		{"must be a number from 1 to 2147483647", "latch set a 0"},
		{"--ttl", "latch set --ttl 1ns a 1"},
		{"must be a number from 1", "latch down a 0"},
		{"greater than zero", "latch wait --wait 0s a"},
		{"argument is missing", "latch delete"},
		{"unknown flag", "latch delete --force a"},
		{"the command is missing", "once"},
		{"must be like [a-z]", "once ls ["},
		{"argument is missing", "once done"},
		{"the slot is missing: redlatch once done [flags] NAME SLOT", "once done a"},
		{"the slot is missing", "once done redlatch_once:{a}:%zz"},
		{"the slot is missing", "once forget {a}:timeout"},
		{"too many arguments", "once forget a b c"},
		{"an argument is empty", "once done a ''"},
		{"--remember", "once done --remember 0s a b"},
		{"too many arguments", "bench a"},
		{"at least 1s", "bench --for 999ms"},
		{"at least 1", "bench --goroutines 0"},
		{"argument is missing: redlatch probe", "probe"},
		{"argument is missing: redlatch inspect", "inspect"},
		{"an argument is empty", "inspect a ''"},
		{"too many arguments", "ls a b"},
		{"an argument is empty", "ls ''"},
		{"must be like [a-z]", "ls ["},
		{"must be like [a-z]", "ls [z-a]"},
		{"argument is missing: redlatch doctor", "doctor"},
		{"an argument is empty", "doctor ''"},
		{"too many arguments", "doctor a b"},
		{"greater than zero", "doctor --watch 0s a"},
		{"greater than zero", "doctor --watch -1s a"},
		{"too many arguments", "top a b"},
		{"needs a terminal", "top"},
		{"must be at least", "top --interval 1ms"},
		{"must be like [a-z]", "top ["},
		{"an argument is empty", "probe a ''"},
		{"must be one of lock, fair, read-write", "probe --kind lock,spin a"},
	} {
		args := strings.Fields(row.args)
		for i, arg := range args {
			args[i] = strings.Trim(arg, "'")
		}
		fails(t, unreachable, statusFailed, row.text, args...)
	}
}

// requests are commands that contact the server.
var requests = [][]string{
	{"inspect", "a"},
	{"ls"},
	{"doctor", "a"},
	{"unlock", "--force", "a"},
	{"permits", "set", "a", "1"},
	{"permits", "drain", "a"},
	{"permits", "release", "a", strings.Repeat("0", 32)},
	{"permits", "release", "--plain", "a"},
	{"latch", "set", "a", "1"},
	{"latch", "down", "a"},
	{"latch", "wait", "a"},
	{"latch", "delete", "a"},
	{"once", "ls"},
	{"once", "done", "a", "b"},
	{"once", "forget", "a", "b"},
	{"probe", "a"},
	{"bench"},
}

// A server that is down, or that does not answer, is a clear error.
func TestUnavailableServer(t *testing.T) {
	silent, _ := silentServer(t)
	for _, args := range requests {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			t.Parallel()
			fails(t, unreachable, statusFailed, "connection refused", args...)
			fails(t, silent, statusFailed, silent, args...)
			fails(t, unreachable, statusFailed, "server URL", append(args, "--url", "redis//")...)
			fails(t, "host:port", statusFailed, "$REDIS_URL: ", args...)
		})
	}
}

// A signal ends each command, even while it waits for the server.
func TestInterrupt(t *testing.T) {
	for _, args := range requests {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			t.Parallel()
			addr, connected := silentServer(t)
			c := start(t, addr+"?write_timeout=1h&dial_timeout=1h", args...)
			harness.Receive(t, patience, "a connection", connected)
			c.signal(syscall.SIGUSR1) // a background job ignores SIGINT, and any program ends by SIGTERM
			require.Equal(t, result{status: 128 + 10}, c.result())
		})
	}
}

// silentServer returns the address of a server that accepts connections and never answers.
func silentServer(t *testing.T) (addr string, connected <-chan struct{}) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted := make(chan struct{}, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			accepted <- struct{}{}
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String(), accepted
}

// A name is the key without the prefix.
func TestPrefix(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		succeeds(t, s.Addr, "--prefix", "app:", "latch", "set", "import", "3")
		require.Equal(t, "2\n", succeeds(t, s.Addr, "latch", "down", "app:import"))
		succeeds(t, s.Addr, "--prefix", "app:", "permits", "set", "slots", "3")
		require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "app:slots"))
		_, err := harness.Client(t, s).Lock("app:orders").Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		require.Equal(t, "orders was held and is open now\n", succeeds(t, s.Addr, "--prefix", "app:", "unlock", "--force", "orders"))
	})
}

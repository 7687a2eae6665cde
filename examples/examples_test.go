package examples_test

import (
	"bufio"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/redlatchtest"
)

// build compiles examples, and returns the folder of the programs.
func build(t *testing.T, packages string) string {
	t.Helper()
	bin := t.TempDir()
	compile(t, ".", bin, packages)
	return bin
}

func compile(t *testing.T, module, bin, packages string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-o", bin+string(filepath.Separator), packages)
	cmd.Dir = module
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// servers start the servers that examples run on.
var servers = map[string]func(testing.TB) *redlatchtest.Server{
	"real": redlatchtest.NewServer, "embedded": redlatchtest.NewEmbedded,
}

// ownServers are the examples that start servers themselves, as a user's first command does.
var ownServers = map[string]bool{"quickstart": true, "quorum": true}

// command returns a run of an example on a server.
func command(t *testing.T, program, server string, args ...string) *exec.Cmd {
	t.Helper()
	env := append(os.Environ(), "REDIS_URL=")
	if name := filepath.Base(program); ownServers[name] {
		if server == "embedded" {
			env = append(env, "PATH=/nowhere", "REDLATCH_SERVER_CACHE=/nowhere")
		}
	} else {
		args = append(args, "-url", servers[server](t).URL())
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.WaitDelay = time.Second
	cmd.Env = env
	return cmd
}

// TestExamples runs every example as a user would, on a real server and on the embedded one.
func TestExamples(t *testing.T) {
	bin := build(t, "./...")
	compile(t, "otel", bin, ".") // a module of its own
	wants := map[string][]string{
		"quickstart":  {"killed during its increment", "Exact."},
		"do":          {"done"},
		"boundedwait": {"still busy", "printing"},
		"reentry":     {"booking -100, holding the account 2 times", "booking +40, holding the account 2 times"},
		"fencing":     {"stale fencing token: 1, after 2 was seen", `the file says "second"`},
		"cache":       {"20 requests, built 1 time(s)"},
		"cron":        {"wrote report 1", ": the disk is full\n", "wrote report 2", "3 runs, 3 reports"},
		"fair":        {"worker 1 prints\nworker 2 prints\nworker 3 prints\n"},
		"fanin":       {", 3 left\n", ", 0 left\n", "all parts are done: 1 4 9 16\n"},
		"catalogue":   {"10 readers at the same time", "wrote 25, reads 25", "wrote 30, reads 30"},
		"workerpool":  {"killed: 1 of 3 permits are free", "96 jobs are done, 3 at once at most", "3 of 3 permits are free again"},
		"transfer":    {"200 transfers between 3 accounts, total 300"},
		"quorum":      {"with 3 of 3 servers: locked", "with 2 of 3 servers: locked", "with 1 of 3 servers: not acquired"},
		"otel":        {`"Name": "redlatch.hold"`, `"Name": "contend"`, `"Value": "message"`, `"Name": "redlatch.acquire.duration"`},
	}
	programs, err := os.ReadDir(bin)
	require.NoError(t, err)
	require.Len(t, programs, len(wants)+2, "two more than here: httpservice and election")
	for name, want := range wants {
		for server := range servers {
			t.Run(name+"/"+server, func(t *testing.T) {
				t.Parallel()
				cmd := command(t, filepath.Join(bin, name), server)
				if name == "do" && server == "real" {
					cmd.Env = append(cmd.Env, "GODEBUG=fips140=only")
				}
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s", out)
				for _, w := range want {
					require.Contains(t, string(out), w)
				}
				if name == "quickstart" {
					require.Equal(t, server == "embedded", strings.Contains(string(out), "embedded server"))
				}
			})
		}
	}
}

// service is a running httpservice.
type service struct {
	cmd   *exec.Cmd
	lines *bufio.Reader
	url   string // of a shipment, but for the number of the order
}

func start(t *testing.T, program string, s *redlatchtest.Server) *service {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, "-url", s.URL(), "-addr", "127.0.0.1:0")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	return &service{cmd, lines, "http://" + strings.TrimPrefix(strings.TrimSpace(line), "listening on ") + "/orders/"}
}

// post requests a shipment, and returns the status and the text of the answer.
func (s *service) post(t *testing.T, order string) string {
	response, err := http.Post(s.url+order+"/shipment", "", nil)
	if !assert.NoError(t, err) {
		return ""
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	assert.NoError(t, err)
	return response.Status[:4] + string(body)
}

// ends waits until the service has ended after a signal.
func (s *service) ends(t *testing.T) {
	t.Helper()
	rest, err := io.ReadAll(s.lines)
	require.NoError(t, err)
	require.Equal(t, "shutting down\n", string(rest))
	require.NoError(t, s.cmd.Wait())
}

// TestHTTPService requests shipments of orders that are free, locked by others, or unknown
// because the server of the locks is away.
func TestHTTPService(t *testing.T) {
	program := filepath.Join(build(t, "./httpservice"), "httpservice")
	for kind, run := range servers {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			server := run(t)
			client := redlatchtest.NewClient(t, server)
			order := client.Lock("order:7")

			s := start(t, program, server)
			hold, err := order.Lock(t.Context())
			require.NoError(t, err)
			require.Equal(t, "409 another request is shipping this order\n", s.post(t, "7"))
			require.NoError(t, hold.Unlock(t.Context()))
			answer := make(chan string, 1)
			go func() { answer <- s.post(t, "7") }()
			require.Eventually(t, func() bool {
				locked, err := order.IsLocked(t.Context())
				return err == nil && locked
			}, time.Minute, time.Millisecond)
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
			require.Equal(t, "200 order 7 is shipped\n", <-answer)
			s.ends(t)

			s = start(t, program, server)
			server.Close()
			require.Eventually(t, func() bool { return s.post(t, "7") == "503 locks are unavailable\n" }, time.Minute, time.Millisecond)
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
			s.ends(t)
		})
	}
}

// candidate is a running process of the example election.
type candidate struct {
	cmd   *exec.Cmd
	lines chan string
}

func stand(t *testing.T, program, name string, s *redlatchtest.Server) *candidate {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, "-url", s.URL(), "-name", name)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	c := &candidate{cmd, make(chan string, 100)}
	go func() {
		defer close(c.lines)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			c.lines <- lines.Text()
		}
	}()
	return c
}

// prints fails the test unless the candidate prints that line within d.
func (c *candidate) prints(t *testing.T, d time.Duration, want string) {
	t.Helper()
	for timeout := time.After(d); ; {
		select {
		case line, ok := <-c.lines:
			require.True(t, ok, "it ended without: %s", want)
			if line == want {
				return
			}
		case <-timeout:
			require.FailNow(t, "it does not print in time: "+want)
		}
	}
}

// ends waits until the process has ended after a signal.
func (c *candidate) ends(t *testing.T) {
	t.Helper()
	for range c.lines {
	}
	require.NoError(t, c.cmd.Wait())
}

// TestElection stops the leader, so that the next candidate leads long before the lease is over.
func TestElection(t *testing.T) {
	const (
		soon  = 10 * time.Second
		lease = 30 * time.Second
	)
	program := filepath.Join(build(t, "./election"), "election")
	for kind, run := range servers {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			server := run(t)
			a := stand(t, program, "A", server)
			a.prints(t, lease, "A leads, token 1")
			b := stand(t, program, "B", server)
			b.prints(t, lease, "B sees that A leads")
			require.Eventually(t, func() bool {
				waiting, err := redlatchtest.NewClient(t, server).FairLock("scheduler").Queue(t.Context())
				return err == nil && len(waiting) == 1
			}, lease, 10*time.Millisecond)
			require.NoError(t, a.cmd.Process.Signal(syscall.SIGTERM))
			b.prints(t, soon, "B leads, token 2")
			a.prints(t, soon, "A ends its term")
			a.ends(t)
			b.prints(t, soon, "B sees that B leads")
			require.NoError(t, b.cmd.Process.Signal(syscall.SIGTERM))
			b.ends(t)
		})
	}
}

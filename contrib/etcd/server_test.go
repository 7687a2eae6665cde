//go:build linux

package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// bound is how long a test waits for what takes a few round trips, or an election, on a busy machine.
const bound = 10 * time.Second

// member is a member of etcd.
type member struct {
	t       testing.TB
	command *exec.Cmd
	args    []string
	dir     string
	addr    string
	env     []string
	peers   []*testserver.Proxy // between it and the others, in both directions
	ended   chan struct{}
}

// program returns the path of etcd.
func program(t testing.TB) string {
	dir := os.Getenv("REDLATCH_SERVER_CACHE")
	if dir == "" {
		cache, err := os.UserCacheDir()
		require.NoError(t, err)
		dir = filepath.Join(cache, "redlatch", "servers")
	}
	names := []string{"etcd-server-3.5", "etcd-server"}
	if chosen := os.Getenv("REDLATCH_ETCD"); chosen != "" {
		names = []string{chosen}
	}
	for _, name := range names {
		path := filepath.Join(dir, "bin", name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	t.Fatalf("no %s: run scripts/servers %s", strings.Join(names, " and no "), names[0])
	return ""
}

// ports returns the addresses of ports that are free.
func ports(t testing.TB, n int) (addrs []string) {
	free, err := testserver.FreePorts(n)
	require.NoError(t, err)
	for _, port := range free {
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", port))
	}
	return addrs
}

// startCluster starts a cluster of n members, which the end of the test stops. Each pair of members has a proxy for the
// connections that one makes to the other. So all members know a member by one name, which is not its address: each has
// an HTTP proxy that finds the others.
func startCluster(t testing.TB, n int, args ...string) []*member {
	t.Helper()
	path := program(t)
	addrs := ports(t, 2*n)
	var members []*member
	var initial []string
	for i := range n {
		members = append(members, &member{t: t, dir: t.TempDir(), addr: addrs[i]})
		initial = append(initial, fmt.Sprintf("m%d=http://m%[1]d:2380", i))
	}
	for i, m := range members {
		hosts := make(map[string]string)
		for j, peer := range members {
			if j == i {
				continue
			}
			p := testserver.NewProxy(t, addrs[n+j])
			hosts[fmt.Sprintf("m%d:2380", j)] = p.Addr
			m.peers = append(m.peers, p)
			peer.peers = append(peer.peers, p)
		}
		m.env = append(os.Environ(), "HTTP_PROXY="+router(t, hosts))
	}

	for i, m := range members {
		client := "http://" + m.addr
		name, self, _ := strings.Cut(initial[i], "=")
		m.args = append([]string{path,
			"--name", name, "--data-dir", filepath.Join(m.dir, "data"), "--unsafe-no-fsync",
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", "http://" + addrs[n+i], "--initial-advertise-peer-urls", self,
			"--initial-cluster", strings.Join(initial, ","),
		}, args...)
		m.start()
	}
	c := connect(t, addrsOf(members)...)
	harness.Eventually(t, 2*bound, "etcd serves", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Get(ctx, "x")
		return err == nil
	})
	return members
}

// router returns the URL of an HTTP proxy that knows the addresses of hosts.
func router(t testing.TB, hosts map[string]string) string {
	dial := func(ctx context.Context, network, host string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, hosts[host])
	}
	transport := &http.Transport{DialContext: dial}
	s := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(*httputil.ProxyRequest) {}, Transport: transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	})
	t.Cleanup(func() {
		s.Close()
		transport.CloseIdleConnections()
	})
	return s.URL
}

func addrsOf(members []*member) (addrs []string) {
	for _, m := range members {
		addrs = append(addrs, m.addr)
	}
	return addrs
}

// start starts the member, again after kill.
func (m *member) start() {
	m.t.Helper()
	output, err := os.OpenFile(filepath.Join(m.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(m.t, err)
	defer output.Close()
	m.command = exec.Command(m.args[0], m.args[1:]...)
	m.command.Stdout = output
	m.command.Stderr = output
	m.command.Env = m.env
	m.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(m.t, m.command.Start())
	m.ended = make(chan struct{})
	command, ended := m.command, m.ended
	go func() {
		_ = command.Wait()
		close(ended)
	}()
	m.t.Cleanup(m.kill)
}

// kill kills the member, unless it has ended.
func (m *member) kill() {
	_ = m.command.Process.Kill()
	<-m.ended
}

// stop stops the process of the member, whose connections stay open, and resume undoes that.
func (m *member) stop() { m.signal(syscall.SIGSTOP) }

func (m *member) resume() { m.signal(syscall.SIGCONT) }

func (m *member) signal(s syscall.Signal) {
	m.t.Helper()
	if err := m.command.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(m.t, err)
	}
}

// isolate sets the faults of the network between the member and the others.
func (m *member) isolate(faults testserver.Fault) {
	for _, p := range m.peers {
		p.Set(faults)
	}
}

// connect returns a client of etcd, which the end of the test closes.
func connect(t testing.TB, addrs ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: addrs, Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// leader returns the index of the leader.
func leader(t testing.TB, members []*member) (index int) {
	t.Helper()
	c := connect(t, addrsOf(members)...)
	defer c.Close()
	harness.Eventually(t, bound, "there is a leader", func() bool {
		for i, m := range members {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			status, err := c.Status(ctx, m.addr)
			cancel()
			if err == nil && status.Leader != 0 && status.Leader == status.Header.MemberId {
				index = i
				return true
			}
		}
		return false
	})
	return index
}

var (
	sharedOnce sync.Once
	sharedAddr string
)

// shared returns the address of an etcd that all tests of the package share.
func shared(t testing.TB) string {
	t.Helper()
	sharedOnce.Do(func() {
		// The test that is first must not stop it.
		forAll := &lasting{TB: t}
		forAll.dir, _ = os.MkdirTemp("", "etcdlock")
		members := startCluster(forAll, 1)
		harness.Finally(func() {
			for _, f := range forAll.cleanups {
				defer f()
			}
			_ = os.RemoveAll(forAll.dir)
		})
		sharedAddr = members[0].addr
	})
	require.NotEmpty(t, sharedAddr, "the shared etcd has not started")
	return sharedAddr
}

// lasting is a test whose cleanups run at the end of the package.
type lasting struct {
	testing.TB
	dir      string
	cleanups []func()
}

func (l *lasting) Cleanup(f func()) { l.cleanups = append(l.cleanups, f) }
func (l *lasting) TempDir() string  { return l.dir }

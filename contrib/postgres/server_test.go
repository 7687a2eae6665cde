package pglock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// soon bounds what takes a few round trips, on a busy machine.
const soon = 10 * time.Second

// pause is the slack of bounds, for a pause of the machine.
const pause = 500 * time.Millisecond

// program returns the path of a program of PostgreSQL that scripts/servers has installed.
func program(name, server string) (string, error) {
	cache := os.Getenv("REDLATCH_SERVER_CACHE")
	if cache == "" {
		user, _ := os.UserCacheDir()
		cache = filepath.Join(user, "redlatch", "servers")
	}
	path := filepath.Join(cache, "bin", name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%s is not installed: run scripts/servers %s", name, server)
	}
	return path, nil
}

// server is a PostgreSQL server.
type server struct {
	dir    string
	prefix []string // of the command that starts it
	host   string
	port   int
	cmd    *exec.Cmd
	log    bytes.Buffer
}

func startServer() (*server, error) { return startAt("127.0.0.1") }

// startAt starts a server that listens on all addresses of the host, which are in its /24, with a command behind a prefix.
func startAt(host string, prefix ...string) (*server, error) {
	initdb, err := program("initdb", "postgres-server")
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "redlatch-")
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o777); err != nil { // the server changes to another user
		return nil, err
	}
	s := &server{dir: dir, host: host, prefix: prefix}
	out, err := exec.Command(initdb, "-D", s.data(), "-U", "postgres", "-A", "trust", "--no-locale", "-E", "UTF8", "--no-sync").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	rights, err := os.OpenFile(filepath.Join(s.data(), "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(rights, "host all all %s/24 trust\n", host); err != nil {
		return nil, err
	}
	if err := rights.Close(); err != nil {
		return nil, err
	}
	for range 5 { // another process may take the port
		if s.port, err = freePort(); err != nil {
			return nil, err
		}
		if err = s.start(); err == nil {
			return s, nil
		}
	}
	return nil, errors.Join(err, os.RemoveAll(dir))
}

func (s *server) data() string { return filepath.Join(s.dir, "data") }

func freePort() (int, error) {
	ports, err := testserver.FreePorts(1)
	if err != nil {
		return 0, err
	}
	return ports[0], nil
}

// start starts the server and waits until it answers.
func (s *server) start() error {
	path, err := program("postgres-server", "postgres-server")
	if err != nil {
		return err
	}
	s.log.Reset()
	listen := s.host
	if len(s.prefix) > 0 {
		listen = "*"
	}
	command := append(slices.Clone(s.prefix), path)
	s.cmd = exec.Command(command[0], append(command[1:], "-D", s.data(), "-h", listen, "-p", strconv.Itoa(s.port), "-k", s.dir,
		"-c", "fsync=off", "-c", "max_connections=300", "-c", "shared_buffers=16MB")...)
	s.cmd.Stdout = &s.log
	s.cmd.Stderr = &s.log
	if err := s.cmd.Start(); err != nil {
		return err
	}

	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		pool, err := pgxpool.New(context.Background(), s.url())
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err = pool.Ping(ctx)
		cancel()
		pool.Close()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			s.stop(syscall.SIGKILL)
			return fmt.Errorf("%w: %s", err, s.log.String())
		}
	}
}

// stop stops the server: with SIGQUIT at once, with SIGINT in order.
func (s *server) stop(sig syscall.Signal) {
	_ = s.cmd.Process.Signal(sig)
	_ = s.cmd.Wait()
}

func (s *server) remove() {
	s.freeze(false)
	s.stop(syscall.SIGQUIT)
	_ = os.RemoveAll(s.dir)
}

func (s *server) addr() string { return net.JoinHostPort(s.host, strconv.Itoa(s.port)) }

func (s *server) url() string { return url(s.addr()) }

func url(addr string) string { return "postgres://postgres@" + addr + "/postgres" }

// freeze stops all processes of the server, or lets them go on.
func (s *server) freeze(on bool) {
	sig := syscall.SIGCONT
	if on {
		sig = syscall.SIGSTOP
	}
	_ = s.cmd.Process.Signal(sig)
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(stat), ") ") // "<pid> (<name>) <state> <parent> ..."
		if fields := strings.Fields(rest); len(fields) > 1 && fields[1] == strconv.Itoa(s.cmd.Process.Pid) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			_ = syscall.Kill(pid, sig)
		}
	}
}

var common = sync.OnceValues(func() (*server, error) {
	s, err := startServer()
	if err == nil {
		harness.Finally(s.remove)
	}
	return s, err
})

// commonServer returns a server that all tests share.
func commonServer(t testing.TB) *server {
	t.Helper()
	s, err := common()
	require.NoError(t, err)
	return s
}

// ownServer returns a server that only this test uses.
func ownServer(t testing.TB) *server {
	t.Helper()
	s, err := startServer()
	require.NoError(t, err)
	t.Cleanup(s.remove)
	return s
}

// newPool returns a pool on that address. The end of the test closes it.
func newPool(t testing.TB, addr string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url(addr)+"?pool_max_conns=8")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// connect returns a pool for an example.
func connect() (pool *pgxpool.Pool, stop func()) {
	s, err := common()
	if err != nil {
		log.Fatal(err)
	}
	pool, err = pgxpool.New(context.Background(), s.url())
	if err != nil {
		log.Fatal(err)
	}
	return pool, pool.Close
}

// pooler is a PgBouncer that pools transactions.
type pooler struct {
	config string
	port   int
	cmd    *exec.Cmd
	log    bytes.Buffer
}

// startPooler starts a pooler. The end of the test stops it.
func startPooler(t testing.TB, s *server) *pooler {
	t.Helper()
	port, err := freePort()
	require.NoError(t, err)
	p := &pooler{config: filepath.Join(t.TempDir(), "pgbouncer.ini"), port: port}
	require.NoError(t, os.WriteFile(p.config, fmt.Appendf(nil, `[databases]
postgres = host=127.0.0.1 port=%d dbname=postgres user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 20
max_client_conn = 200
server_login_retry = 1
`, s.port, port), 0o644))
	p.start(t)
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Log(p.log.String())
		}
	})
	return p
}

// start starts the pooler and waits until it answers.
func (p *pooler) start(t testing.TB) {
	t.Helper()
	path, err := program("pgbouncer", "pgbouncer")
	require.NoError(t, err)
	p.cmd = exec.Command(path, p.config)
	p.cmd.Stdout = &p.log
	p.cmd.Stderr = &p.log
	require.NoError(t, p.cmd.Start())
	harness.Eventually(t, soon, "the pooler answers", func() bool {
		conn, err := net.Dial("tcp", p.addr())
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}

func (p *pooler) stop() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *pooler) addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)) }

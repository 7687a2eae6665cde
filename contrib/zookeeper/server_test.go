package zklock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

const (
	soon  = 10 * time.Second       // bounds what takes a moment, on a busy machine
	slack = 500 * time.Millisecond // for pauses of the process

	tick    = 500 * time.Millisecond // of the servers
	timeout = 4 * time.Second        // of the sessions

	// How many ticks a server answers clients without having heard of its leader.
	syncLimit = 4
	longLimit = 16 // longer than a session
)

// withoutKnownRaces runs the tests again if the race detector does not know yet which reports are not about this package.
func withoutKnownRaces() {
	const option = "suppressions=testdata/race.suppressions"
	options := os.Getenv("GORACE")
	if strings.Contains(options, "suppressions=") {
		return
	}
	test, err := os.Executable()
	if err == nil {
		err = os.Setenv("GORACE", options+" "+option)
	}
	if err == nil {
		err = syscall.Exec(test, os.Args, os.Environ())
	}
	log.Fatal(err)
}

func TestMain(m *testing.M) {
	withoutKnownRaces()
	if servers := os.Getenv(workerEnv); servers != "" {
		work(servers)
		return
	}
	if args := os.Getenv(contenderEnv); args != "" {
		contendFor(args)
		return
	}

	code := m.Run()
	common.stop()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, "goroutines left behind:", err)
		code = 1
	}
	os.Exit(code)
}

// server is a ZooKeeper.
type server struct {
	dir     string
	addr    string
	flags   string // further options of the JVM
	process *exec.Cmd
	output  bytes.Buffer
	exited  chan struct{}
}

// program returns the path of the command zookeeper-server.
func program() (string, error) {
	if path, err := exec.LookPath("zookeeper-server"); err == nil {
		return path, nil
	}
	cache := os.Getenv("REDLATCH_SERVER_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(user, "redlatch", "servers")
	}
	path := filepath.Join(cache, "bin", "zookeeper-server")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("ZooKeeper is missing: run scripts/servers zookeeper-server (%w)", err)
	}
	return path, nil
}

// newServers prepares an ensemble of n servers. A follower finds its leader at the address that via returns for the
// leader's.
func newServers(dir string, n, syncLimit int, via func(from, to int, addr string) string) ([]*server, error) {
	ports, err := testserver.FreePorts(3 * n)
	if err != nil {
		return nil, err
	}

	servers := make([]*server, n)
	for i := range servers {
		s := &server{dir: filepath.Join(dir, fmt.Sprint(i+1)), addr: fmt.Sprintf("127.0.0.1:%d", ports[3*i])}
		config := fmt.Sprintf("tickTime=%d\ninitLimit=10\nsyncLimit=%d\ndataDir=%s\nclientPort=%d\nclientPortAddress=127.0.0.1\n",
			tick.Milliseconds(), syncLimit, s.dir, ports[3*i])
		config += "maxClientCnxns=0\nadmin.enableServer=false\n4lw.commands.whitelist=*\n"
		for j := range n {
			addr := fmt.Sprintf("127.0.0.1:%d", ports[3*j+1])
			if via != nil && j != i {
				addr = via(i, j, addr)
			}
			if n > 1 {
				config += fmt.Sprintf("server.%d=%s:%d\n", j+1, addr, ports[3*j+2])
			}
		}
		if err := os.MkdirAll(s.dir, 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(s.dir, "myid"), []byte(fmt.Sprint(i+1)), 0o600); err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(s.dir, "zoo.cfg"), []byte(config), 0o600); err != nil {
			return nil, err
		}
		servers[i] = s
	}
	return servers, nil
}

// configure adds lines to the configuration.
func (s *server) configure(t testing.TB, lines string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(s.dir, "zoo.cfg"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(lines)
	require.NoError(t, errors.Join(err, f.Close()))
}

// start starts the process.
func (s *server) start() error {
	path, err := program()
	if err != nil {
		return err
	}
	s.process = exec.Command(path, filepath.Join(s.dir, "zoo.cfg"))
	s.process.Env = append(os.Environ(),
		"JVMFLAGS=-Xmx96m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dzookeeper.forceSync=no -Dznode.container.checkIntervalMs=500 "+
			"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn "+s.flags)
	s.process.Stdout = &s.output
	s.process.Stderr = &s.output
	if err := s.process.Start(); err != nil {
		return err
	}
	process, exited := s.process, make(chan struct{})
	s.exited = exited
	go func() {
		_ = process.Wait()
		close(exited)
	}()
	return nil
}

// stop kills the process.
func (s *server) stop() {
	if s.process == nil {
		return
	}
	_ = s.process.Process.Kill()
	<-s.exited
	s.process = nil
}

func (s *server) signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	require.NoError(t, s.process.Process.Signal(signal))
}

// mode returns what the server is: leader, follower, standalone, or "" if it does not serve.
func (s *server) mode() string {
	_, rest, _ := strings.Cut(s.ask("srvr"), "Mode: ")
	mode, _, _ := strings.Cut(rest, "\n")
	return mode
}

// ask returns the answer to a command for operators, or "".
func (s *server) ask(command string) string {
	conn, err := net.DialTimeout("tcp", s.addr, time.Second)
	if err != nil {
		return ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	_, _ = conn.Write([]byte(command))
	answer, _ := io.ReadAll(conn)
	return string(answer)
}

// await blocks until the server serves.
func (s *server) await() error {
	for deadline := time.Now().Add(3 * soon); time.Now().Before(deadline); {
		if s.mode() != "" {
			return nil
		}
		select {
		case <-s.exited:
			return fmt.Errorf("ZooKeeper has ended: %s", s.output.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return fmt.Errorf("ZooKeeper does not serve: %s", s.addr)
}

// ensemble starts n servers that only this test uses.
func ensemble(t testing.TB, n int, flags ...string) []*server {
	t.Helper()
	servers, err := newServers(t.TempDir(), n, syncLimit, nil)
	require.NoError(t, err)
	return run(t, servers, flags...)
}

// run starts servers for this test.
func run(t testing.TB, servers []*server, flags ...string) []*server {
	t.Helper()
	for _, s := range servers {
		s.flags = strings.Join(flags, " ")
		require.NoError(t, s.start())
		t.Cleanup(s.stop)
	}
	for _, s := range servers {
		require.NoError(t, s.await())
	}
	return servers
}

// addrs returns the addresses of servers.
func addrs(servers []*server) []string {
	var all []string
	for _, s := range servers {
		all = append(all, s.addr)
	}
	return all
}

// common is the server of the tests that do not stop it.
var common sharedServer

type sharedServer struct {
	once sync.Once
	dir  string
	s    *server
	err  error
}

func (c *sharedServer) addr(t testing.TB) string {
	t.Helper()
	addr, err := c.start()
	require.NoError(t, err)
	return addr
}

// start starts the server if it does not run, and returns its address.
func (c *sharedServer) start() (string, error) {
	c.once.Do(func() {
		c.dir, c.err = os.MkdirTemp("", "zklock")
		if c.err != nil {
			return
		}
		var servers []*server
		servers, c.err = newServers(c.dir, 1, syncLimit, nil)
		if c.err != nil {
			return
		}
		c.s = servers[0]
		c.err = c.s.start()
		if c.err == nil {
			c.err = c.s.await()
		}
	})
	if c.err != nil {
		return "", c.err
	}
	return c.s.addr, nil
}

// Servers returns the servers of the examples.
func Servers() []string {
	addr, err := common.start()
	if err != nil {
		log.Fatal(err)
	}
	return []string{addr}
}

func (c *sharedServer) stop() {
	if c.s != nil {
		c.s.stop()
	}
	_ = os.RemoveAll(c.dir)
}

// silent is a logger that drops everything.
type silent struct{}

func (silent) Printf(string, ...any) {}

// process is what one process has.
type process struct {
	*Client
	conn    *zk.Conn
	session *Session
}

// open returns a client on those servers, closed with its connection by the end of the test.
func open(t testing.TB, servers []string, opts ...Option) *process {
	t.Helper()
	return openWith(t, servers, timeout, nil, opts...)
}

func openWith(t testing.TB, servers []string, timeout time.Duration, dial zk.Dialer, opts ...Option) *process {
	t.Helper()
	conn, session := connect(t, servers, timeout, dial)
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	client, err := New(ctx, conn, session, opts...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return &process{Client: client, conn: conn, session: session}
}

func connect(t testing.TB, servers []string, timeout time.Duration, dial zk.Dialer) (*zk.Conn, *Session) {
	t.Helper()
	session := NewSession(dial)
	conn, _, err := zk.Connect(servers, timeout, zk.WithDialer(session.Dial), zk.WithLogger(silent{}))
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn, session
}

// admin returns a connection beside those of the clients.
func admin(t testing.TB, servers ...string) *zk.Conn {
	t.Helper()
	conn, _, err := zk.Connect(servers, timeout, zk.WithLogger(silent{}))
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

var names atomic.Int64

// unused returns the name of a lock that nobody uses.
func unused(t testing.TB) string {
	return fmt.Sprintf("%s-%d", t.Name(), names.Add(1))
}

// nodes returns the nodes of a lock.
func nodes(t testing.TB, conn *zk.Conn, name string) []string {
	t.Helper()
	return children(t, conn, DefaultPrefix+"/"+locks+"/"+escape(name))
}

func children(t testing.TB, conn *zk.Conn, folder string) []string {
	t.Helper()
	names, _, err := conn.Children(folder)
	if err != zk.ErrNoNode {
		require.NoError(t, err)
	}
	return names
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(soon); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			require.Fail(t, "it did not come to be that "+what)
		}
	}
}

// acquire acquires a lock within a bound.
func acquire(t testing.TB, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(context.Background(), append([]lock.Option{lock.Wait(3 * soon)}, opts...)...)
	require.NoError(t, err)
	return h
}

// listener is a dialer that keeps the password of the session.
type listener struct {
	mu      sync.Mutex
	answers map[int64][]byte // by session id
}

func (l *listener) dial(network, address string, timeout time.Duration) (net.Conn, error) {
	c, err := net.DialTimeout(network, address, timeout)
	if err != nil {
		return nil, err
	}
	return &heard{Conn: c, l: l}, nil
}

type heard struct {
	net.Conn
	l      *listener
	answer []byte
}

const connectAnswer = answerSize + 4 + 16 // with the password

func (h *heard) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	if len(h.answer) < connectAnswer {
		h.answer = append(h.answer, p[:n]...)
		if len(h.answer) >= connectAnswer {
			h.l.mu.Lock()
			h.l.answers[int64(binary.BigEndian.Uint64(h.answer[12:]))] = h.answer[answerSize+4 : connectAnswer]
			h.l.mu.Unlock()
		}
	}
	return n, err
}

var errUnknownSession = errors.New("the session is not known")

// end ends a session as if another connection of it had been closed.
func (l *listener) end(addr string, id int64) error {
	l.mu.Lock()
	password := l.answers[id]
	l.mu.Unlock()
	if password == nil {
		return errUnknownSession
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))

	request := binary.BigEndian.AppendUint32(nil, 4+8+4+8+4+16)
	request = binary.BigEndian.AppendUint32(request, 0)
	request = binary.BigEndian.AppendUint64(request, 0)
	request = binary.BigEndian.AppendUint32(request, uint32(timeout.Milliseconds()))
	request = binary.BigEndian.AppendUint64(request, uint64(id))
	request = binary.BigEndian.AppendUint32(request, uint32(len(password)))
	if _, err := c.Write(append(request, password...)); err != nil {
		return err
	}
	answer := make([]byte, connectAnswer)
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	if known := int64(binary.BigEndian.Uint64(answer[12:])); known != id {
		return errUnknownSession
	}

	request = binary.BigEndian.AppendUint32(nil, 8)
	request = binary.BigEndian.AppendUint32(request, 1)
	code := int32(closeSession)
	request = binary.BigEndian.AppendUint32(request, uint32(code))
	if _, err := c.Write(request); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, c) // until the server has ended it
	return nil
}

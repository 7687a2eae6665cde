package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/redlatch/redlatch/internal/testserver"
)

// services are the servers of the peers. Each is started on first use, as a single node with
// its default settings; those that write locks to a disk also sync them. They listen on the
// loopback interface only. The zero value has started none.
type services struct {
	mu     sync.Mutex
	redis  []*testserver.Server
	others map[string]*daemon // by store
}

// errMissing reports that the server of a peer is not installed.
var errMissing = errors.New("not installed")

// addrs returns the addresses of n servers of a peer, without locks of earlier measurements.
func (s *services) addrs(peer string, n int) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if store := stores[peer]; store != "" {
		d, ok := s.others[store]
		if !ok {
			var err error
			if d, err = daemons[store](); err != nil {
				return nil, err
			}
			if s.others == nil {
				s.others = map[string]*daemon{}
			}
			s.others[store] = d
		}
		return []string{d.addr}, nil
	}
	chosen := testserver.Chosen()
	if len(chosen) == 0 {
		return nil, errors.New(testserver.Missing)
	}
	for len(s.redis) < n {
		r, err := testserver.Start(chosen[0])
		if err != nil {
			return nil, err
		}
		s.redis = append(s.redis, r)
	}
	var addrs []string
	for _, r := range s.redis[:n] {
		if _, err := testserver.Command(r.Addr, "FLUSHALL"); err != nil {
			return nil, err
		}
		addrs = append(addrs, r.Addr)
	}
	return addrs, nil
}

// stop ends the servers and removes their files.
func (s *services) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.redis {
		r.Stop()
	}
	for _, d := range s.others {
		d.stop()
	}
}

// stopWhenInterrupted stops the servers when a signal ends this program.
func (s *services) stopWhenInterrupted() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		s.stop()
		os.Exit(1)
	}()
}

// stores has the store of each peer that does not lock on Redis.
var stores = map[string]string{
	"etcd": "etcd", "etcdlock": "etcd",
	"zookeeper": "zookeeper", "zklock": "zookeeper", curator: "zookeeper",
	"postgres": "postgres", "advisory": "postgres", "rows": "postgres",
	"mariadb": "mariadb",
}

// daemons start the servers of stores. The peer of that name is the store's own recipe.
var daemons = map[string]func() (*daemon, error){
	"etcd":      startEtcd,
	"zookeeper": startZookeeper,
	"postgres":  startPostgres,
	"mariadb":   startMariaDB,
}

// daemon is a server in its own process, with its data in a temporary directory.
type daemon struct {
	port   string // for its clients
	addr   string
	dir    string
	user   *syscall.Credential // nil is the user of this program
	end    syscall.Signal      // stops it
	cmd    *exec.Cmd
	exited chan struct{}
	output bytes.Buffer
}

// newDaemon finds a port and creates a directory. If this user is root, it selects a system
// user, because some servers refuse to run as root.
func newDaemon(owner string, end syscall.Signal) (*daemon, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "redlatch-")
	if err != nil {
		return nil, err
	}
	d := &daemon{port: port, dir: dir, end: end}
	if owner == "" || os.Getuid() != 0 {
		return d, nil
	}
	of, err := user.Lookup(owner)
	if err == nil {
		uid, _ := strconv.Atoi(of.Uid)
		gid, _ := strconv.Atoi(of.Gid)
		d.user = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		err = os.Chown(dir, uid, gid)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return d, nil
}

func (d *daemon) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Dir = d.dir
	// The server ends with this program in any case.
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: d.user, Pdeathsig: d.end}
	return cmd
}

// prepare runs a program to its end.
func (d *daemon) prepare(program string, args ...string) error {
	if out, err := d.command(program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", program, err, out)
	}
	return nil
}

const daemonTimeout = time.Minute

// serve starts the server and blocks until its peer can lock. If that fails, the server is
// stopped.
func (d *daemon) serve(peer, program string, args ...string) error {
	d.cmd = d.command(program, args...)
	d.cmd.Stdout, d.cmd.Stderr = &d.output, &d.output
	if err := d.cmd.Start(); err != nil {
		d.cmd = nil
		return err
	}
	d.exited = make(chan struct{})
	go func() {
		_ = d.cmd.Wait()
		close(d.exited)
	}()
	for deadline := time.Now().Add(daemonTimeout); ; {
		err := d.try(peer)
		if err == nil {
			return nil
		}
		select {
		case <-d.exited:
			return fmt.Errorf("%s ended at once:\n%s", program, d.output.String())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not respond: %w", program, err)
		}
	}
}

func (d *daemon) try(peer string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	t := task{Peer: peer, Addrs: []string{d.addr}, Kind: "lock"}
	s, err := open(ctx, t)
	if err != nil {
		return err
	}
	defer s.close()
	op, err := s.operation(ctx, t, "ready")
	if err != nil {
		return err
	}
	if err := op.acquire(ctx); err != nil {
		return err
	}
	return op.release(ctx)
}

func (d *daemon) stop() {
	if d.cmd != nil {
		_ = d.cmd.Process.Signal(d.end)
		late := time.AfterFunc(10*time.Second, func() { _ = d.cmd.Process.Kill() })
		<-d.exited
		late.Stop()
	}
	_ = os.RemoveAll(d.dir)
}

// started returns d, or nothing if it could not be started.
func (d *daemon) started(err error) (*daemon, error) {
	if err != nil {
		d.stop()
		return nil, err
	}
	return d, nil
}

// freePort returns an unused port.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// find returns the last of the files that match a pattern or, for a bare name, the program: one that is installed, or that
// scripts/servers has installed.
func find(pattern string) (string, error) {
	if !filepath.IsAbs(pattern) {
		if found, err := testserver.LookPath(pattern); err == nil {
			return found, nil
		}
		pattern = filepath.Join("/usr/sbin", pattern)
	}
	if found, _ := filepath.Glob(pattern); len(found) > 0 {
		return slices.Max(found), nil
	}
	return "", fmt.Errorf("%s: %w", filepath.Base(pattern), errMissing)
}

// Programs that scripts/servers installs.
const (
	etcdServer      = "etcd-server-3.5"
	zookeeperServer = "zookeeper-server"
)

func startEtcd() (*daemon, error) {
	program, err := find(etcdServer)
	if err != nil {
		return nil, err
	}
	peers, err := freePort()
	if err != nil {
		return nil, err
	}
	d, err := newDaemon("", syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	d.addr = "127.0.0.1:" + d.port
	toClients, toPeers := "http://"+d.addr, "http://127.0.0.1:"+peers
	return d.started(d.serve("etcd", program, "--data-dir", d.dir,
		"--listen-client-urls", toClients, "--advertise-client-urls", toClients, "--listen-peer-urls", toPeers,
		"--initial-advertise-peer-urls", toPeers, "--initial-cluster", "default="+toPeers))
}

func startZookeeper() (*daemon, error) {
	program, err := find(zookeeperServer)
	if err != nil {
		return nil, err
	}
	d, err := newDaemon("", syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	d.addr = "127.0.0.1:" + d.port
	// The configuration is the example of the distribution except for the ports. The
	// administration server would listen on all interfaces.
	settings := filepath.Join(d.dir, "zoo.cfg")
	err = os.WriteFile(settings, []byte("tickTime=2000\ndataDir="+d.dir+"\nclientPort="+d.port+
		"\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n"), 0o600)
	if err == nil {
		err = d.serve("zookeeper", "env", "JVMFLAGS=-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", program, settings)
	}
	return d.started(err)
}

func startPostgres() (*daemon, error) {
	initdb, err := find("/usr/lib/postgresql/*/bin/initdb")
	if err != nil {
		return nil, err
	}
	d, err := newDaemon("postgres", syscall.SIGINT) // disconnects its clients
	if err != nil {
		return nil, err
	}
	d.addr = "postgres://postgres@127.0.0.1:" + d.port + "/postgres?sslmode=disable"
	data := filepath.Join(d.dir, "data")
	if err = d.prepare(initdb, "-D", data, "-U", "postgres", "-A", "trust"); err == nil {
		err = d.serve("postgres", filepath.Join(filepath.Dir(initdb), "postgres"),
			"-D", data, "-h", "127.0.0.1", "-p", d.port, "-k", d.dir)
	}
	return d.started(err)
}

func startMariaDB() (*daemon, error) {
	program, err := find("mariadbd")
	if err != nil {
		return nil, err
	}
	install, err := find("mariadb-install-db")
	if err != nil {
		return nil, err
	}
	d, err := newDaemon("mysql", syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	d.addr = "root@tcp(127.0.0.1:" + d.port + ")/"
	data := filepath.Join(d.dir, "data")
	err = d.prepare(install, "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db")
	if err == nil {
		err = d.serve("mariadb", program, "--no-defaults", "--datadir="+data, "--bind-address=127.0.0.1", "--port="+d.port,
			"--socket="+filepath.Join(d.dir, "socket"), "--pid-file="+filepath.Join(d.dir, "pid"))
	}
	return d.started(err)
}

package redlatchtest

import (
	"errors"
	"net"
	"sync"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
)

// embedded is a server in this process. Its port is open from the start, so that url cannot fail, but it
// accepts no connection before the first call of url: the clock of a bubble of testing/synctest stands still
// while a goroutine waits for the network.
type embedded struct {
	redis     *miniredis.Miniredis
	listener  net.Listener
	accept    func() // starts acceptAll, once
	accepting sync.WaitGroup

	mu     sync.Mutex
	closed bool
}

func listen() (*embedded, error) {
	redis := miniredis.NewMiniRedis()
	conn, err := redis.Dial() // starts it without a listener of its own
	if err != nil {
		return nil, err
	}
	_ = conn.Close()
	redis.ClockTTL(true) // keys expire
	redis.Server().SetPreHook(refuseCluster)

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		redis.Close()
		return nil, err
	}
	e := &embedded{redis: redis, listener: listener}
	e.accept = sync.OnceFunc(func() { e.accepting.Go(e.acceptAll) })
	return e, nil
}

// refuseCluster has the server answer as one that is no cluster. miniredis answers as a cluster of one node,
// whose address is not that of the listener.
func refuseCluster(p *server.Peer, command string, _ ...string) (handled bool) {
	if command != "CLUSTER" {
		return false
	}
	p.WriteError("ERR This instance has cluster support disabled")
	return true
}

func (e *embedded) url() string {
	e.accept()
	return "redis://" + e.listener.Addr().String()
}

// acceptAll serves connections of the network until close.
func (e *embedded) acceptAll() {
	for {
		conn, err := e.listener.Accept()
		if err != nil {
			return
		}
		_ = e.serve(conn)
	}
}

// dial returns a connection in memory.
func (e *embedded) dial() (net.Conn, error) {
	client, remote := net.Pipe()
	return client, e.serve(remote)
}

// serve answers the requests of a connection in the background. If the server is closed, it closes the
// connection and returns an error.
func (e *embedded) serve(conn net.Conn) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		_ = conn.Close()
		return errors.New("the embedded server is closed")
	}
	e.redis.Server().ServeConn(conn)
	return nil
}

func (e *embedded) close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()

	_ = e.listener.Close()
	e.accepting.Wait()
	e.redis.Close()
}

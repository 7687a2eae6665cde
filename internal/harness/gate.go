package harness

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
)

// Gate stands between a client and its server and does things to one request:
// it keeps its reply back, loses the reply with the connection, or loses the
// request with the connection.
type Gate struct {
	mu      sync.Mutex
	fate    fate
	match   []byte
	skip    int
	reached chan struct{}
	shut    chan struct{} // closed when replies may pass; nil: they may
	lost    []byte        // the request that was lost last
	server  string
}

type fate int

const (
	keepReply fate = iota
	loseReply
	loseRequest
)

// GatedClient returns a client whose replies the gate can keep back.
func GatedClient(t testing.TB, s *testserver.Server, opts ...redlatch.Option) (*redlatch.Client, *Gate) {
	t.Helper()
	g := &Gate{server: s.Addr}
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{
		InitAddress: []string{s.Addr},
		DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
			conn, err := d.DialContext(ctx, "tcp", addr)
			return &gatedConn{Conn: conn, g: g}, err
		},
	}, opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	t.Cleanup(g.Open)
	return c, g
}

// Shut keeps replies back from when the n-th request, from 1, that contains
// match has been written: the server has acted on it, and the client does not
// know. The channel is closed then.
func (g *Gate) Shut(match string, n int) (reached <-chan struct{}) { return g.arm(keepReply, match, n) }

// LoseReply breaks the connection when the reply to the n-th request that
// contains match has arrived, before the client sees it.
func (g *Gate) LoseReply(match string, n int) (reached <-chan struct{}) {
	return g.arm(loseReply, match, n)
}

// LoseRequest breaks the connection in the place of the n-th request that
// contains match: the server never sees it, and the client cannot know.
func (g *Gate) LoseRequest(match string, n int) (reached <-chan struct{}) {
	return g.arm(loseRequest, match, n)
}

// DeliverLost sends the request that was lost after all, as a network does that
// held it up, and waits for its reply.
func (g *Gate) DeliverLost(t testing.TB) {
	t.Helper()
	conn, err := net.Dial("tcp", g.server)
	require.NoError(t, err)
	defer conn.Close()
	g.mu.Lock()
	request := g.lost
	g.mu.Unlock()
	_, err = conn.Write(request)
	require.NoError(t, err)
	_, err = conn.Read(make([]byte, 1))
	require.NoError(t, err)
}

func (g *Gate) arm(f fate, match string, n int) <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fate, g.match, g.skip, g.reached = f, []byte(match), n-1, make(chan struct{})
	return g.reached
}

// Open lets everything pass, what was kept back included.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.match = nil
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

type gatedConn struct {
	net.Conn
	g    *Gate
	lose bool // the next reply; belongs to the gate's mutex
}

func (c *gatedConn) Write(b []byte) (int, error) {
	g := c.g
	g.mu.Lock()
	hit := false
	if g.match != nil {
		n := bytes.Count(b, g.match)
		hit = n > g.skip
		g.skip -= n
	}
	if !hit {
		g.mu.Unlock()
		return c.Conn.Write(b)
	}
	g.match = nil
	reached, fate := g.reached, g.fate
	switch fate {
	case keepReply:
		g.shut = make(chan struct{})
	case loseReply:
		c.lose = true
	case loseRequest:
		g.lost = bytes.Clone(b)
	}
	g.mu.Unlock()
	defer close(reached)
	if fate == loseRequest {
		return len(b), c.Conn.Close()
	}
	return c.Conn.Write(b)
}

func (c *gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.g.mu.Lock()
	shut, lose := c.g.shut, c.lose
	c.g.mu.Unlock()
	if lose {
		c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	if shut != nil {
		<-shut
	}
	return n, err
}

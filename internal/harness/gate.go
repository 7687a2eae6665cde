package harness

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"sync"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
)

// Gate stands between a client and its server and can keep the replies back
// after a certain request went through: the server has acted on it, and the
// client does not know.
type Gate struct {
	mu      sync.Mutex
	match   []byte
	skip    int
	reached chan struct{}
	shut    chan struct{} // closed when replies may pass; nil: they may
}

// GatedClient returns a client whose replies the gate can keep back.
func GatedClient(t testing.TB, s *testserver.Server, opts ...redlatch.Option) (*redlatch.Client, *Gate) {
	t.Helper()
	g := &Gate{}
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{
		InitAddress: []string{s.Addr},
		DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
			conn, err := d.DialContext(ctx, "tcp", addr)
			return &gatedConn{conn, g}, err
		},
	}, opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	t.Cleanup(g.Open)
	return c, g
}

// Shut keeps replies back from when the n-th request, from 1, that contains
// match has been written. The channel is closed then.
func (g *Gate) Shut(match string, n int) (reached <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.match, g.skip, g.reached = []byte(match), n-1, make(chan struct{})
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
	g *Gate
}

func (c *gatedConn) Write(b []byte) (int, error) {
	g := c.g
	g.mu.Lock()
	if g.match != nil {
		if n := bytes.Count(b, g.match); n > g.skip {
			g.match, g.shut = nil, make(chan struct{})
			defer close(g.reached)
		} else {
			g.skip -= n
		}
	}
	g.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.g.mu.Lock()
	shut := c.g.shut
	c.g.mu.Unlock()
	if shut != nil {
		<-shut
	}
	return n, err
}

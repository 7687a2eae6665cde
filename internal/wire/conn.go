package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// Conns are the connections of a client.
type Conns struct {
	// Contended is set when a caller begins to wait for another. From then on no caller waits for the
	// reply to the request of another one before its own is sent.
	Contended atomic.Bool

	mu       sync.Mutex
	open     map[*conn]struct{}
	redialed time.Time // when they were last closed
}

// errRedialed is the error of a request on a connection that was closed to be made anew. It was not sent.
var errRedialed = errors.New("redlatch: the connection is made anew")

// redialPause is the least time between two calls of redial that close connections.
const redialPause = time.Second

// NewConns makes clients of opt use connections of this package, and returns them. It returns nil if the
// options do not allow that.
func NewConns(opt *rueidis.ClientOption) *Conns {
	if opt.DisableTCPNoDelay {
		return nil // rueidis needs the bare connection
	}

	cs := &Conns{open: make(map[*conn]struct{})}
	dial := opt.DialCtxFn
	dialFn := opt.DialFn
	opt.DialCtxFn = func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (c net.Conn, err error) {
		// rueidis never ends the requests that wait for a connection whose dialer has panicked.
		defer func() {
			if v := recover(); v != nil {
				c = nil
				err = fmt.Errorf("redlatch: the dialer has panicked: %v", v)
			}
		}()
		if dial != nil {
			c, err = dial(ctx, addr, d, conf)
		} else if dialFn != nil {
			c, err = dialFn(addr, d, conf)
		} else if conf != nil {
			c, err = (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, "tcp", addr)
			err = withoutTLS(err)
		} else {
			c, err = d.DialContext(ctx, "tcp", addr)
		}
		if err != nil {
			return nil, err
		}
		return cs.add(c), nil
	}
	return cs
}

// withoutTLS adds to the error of a TLS connection that the server may not use TLS. Such a
// server answers the handshake with an error reply, or waits for the rest of a command.
func withoutTLS(err error) error {
	var reply tls.RecordHeaderError
	if errors.As(err, &reply) {
		return fmt.Errorf("%w: the server does not use TLS on this port", err)
	}
	if err == context.DeadlineExceeded { // a timeout of the TCP connection is a *net.OpError
		return fmt.Errorf("%w: no answer to the TLS handshake: the server may not use TLS on this port", err)
	}
	return err
}

func (cs *Conns) add(c net.Conn) *conn {
	own := &conn{Conn: c, written: make(chan struct{}), of: cs}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.open[own] = struct{}{}
	return own
}

// mayRedial reports whether the connections may be closed again, and notes that they are.
func (cs *Conns) mayRedial() bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if time.Since(cs.redialed) < redialPause {
		return false
	}
	cs.redialed = time.Now()
	return true
}

// redial closes all connections, so that they are made anew.
func (cs *Conns) redial() {
	for _, c := range cs.all() {
		c.redialed.Store(true)
		_ = c.Close()
	}
}

// Cut closes all connections, so that the requests under way fail.
func (cs *Conns) Cut() {
	for _, c := range cs.all() {
		_ = c.Close()
	}
}

func (cs *Conns) all() []*conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.Collect(maps.Keys(cs.open))
}

// conn is a connection that blocks reads until the first write. A server that has reached
// its client limit sends an unsolicited error, and rueidis panics if it reads one on a
// connection that it closes before the first command.
type conn struct {
	net.Conn
	once     sync.Once
	written  chan struct{} // closed by the first Write, or Close
	of       *Conns
	redialed atomic.Bool // it is closed to be made anew
}

func (c *conn) unblockReads() { c.once.Do(func() { close(c.written) }) }

// reason returns err, or why the connection was closed.
func (c *conn) reason(err error) error {
	if err != nil && c.redialed.Load() {
		return errRedialed
	}
	return err
}

func (c *conn) Read(b []byte) (int, error) {
	<-c.written
	n, err := c.Conn.Read(b)
	return n, c.reason(err)
}

func (c *conn) Write(b []byte) (int, error) {
	c.unblockReads()
	n, err := c.Conn.Write(b)
	return n, c.reason(err)
}

func (c *conn) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	c.unblockReads()
	return c.Conn.Close()
}

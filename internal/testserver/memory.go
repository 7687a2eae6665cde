package testserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// InMemory returns the options of a client whose connections dial makes: both ends of each are in this
// process, like those of a net.Pipe. Without a network a client works in a bubble of testing/synctest.
// Requests arrive after the latency.
func InMemory(dial func() (net.Conn, error), latency time.Duration) rueidis.ClientOption {
	return rueidis.ClientOption{
		InitAddress: []string{"memory:0"}, DisableCache: true,
		ForceSingleClient: true, // the embedded server looks like a cluster of one node
		DialCtxFn: func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
			conn, err := dial()
			if err != nil {
				return nil, &net.OpError{Op: "dial", Net: "memory", Err: err} // as of a network
			}
			return newBufferedConn(conn, latency), nil
		},
		// rueidis sends a PING on an idle connection at this interval.
		Dialer: net.Dialer{KeepAlive: time.Hour},
	}
}

// bufferedConn buffers writes like a socket, and each arrives after the latency. Without a buffer the two
// ends of a net.Pipe can deadlock when both write.
type bufferedConn struct {
	net.Conn
	latency time.Duration

	mu      sync.Mutex
	more    sync.Cond
	pending []write
	err     error // set when the writer has ended
}

type write struct {
	data    []byte
	arrives time.Time
}

func newBufferedConn(conn net.Conn, latency time.Duration) *bufferedConn {
	c := &bufferedConn{Conn: conn, latency: latency}
	c.more.L = &c.mu
	go c.pass()
	return c
}

// pass writes the pending data until the connection is closed.
func (c *bufferedConn) pass() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil {
		if len(c.pending) == 0 {
			c.more.Wait()
			continue
		}
		next := c.pending[0]
		c.pending = c.pending[1:]
		c.mu.Unlock()
		time.Sleep(time.Until(next.arrives))
		_, err := c.Conn.Write(next.data)
		c.mu.Lock()
		if err != nil {
			c.err = err
		}
	}
}

func (c *bufferedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.pending = append(c.pending, write{bytes.Clone(b), time.Now().Add(c.latency)})
	c.more.Signal()
	return len(b), nil
}

func (c *bufferedConn) Close() error {
	err := c.Conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = net.ErrClosed
	c.more.Signal()
	return err
}

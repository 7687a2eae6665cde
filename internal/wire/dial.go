package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// OwnConns makes clients of opt use connections of this package, and returns what links them to requests.
// It returns nil if the options do not allow that.
func OwnConns(opt *rueidis.ClientOption) *Link {
	if opt.DisableTCPNoDelay {
		return nil // rueidis needs the bare connection
	}

	link := NewLink(opt.ConnWriteTimeout)
	dial := opt.DialCtxFn
	dialFn := opt.DialFn
	opt.DialCtxFn = func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (conn net.Conn, err error) {
		Keep(ctx)

		// rueidis never ends the requests that wait for a connection whose dialer has panicked.
		defer func() {
			if v := recover(); v != nil {
				conn = nil
				err = fmt.Errorf("redlatch: the dialer has panicked: %v", v)
			}
		}()
		if dial != nil {
			conn, err = dial(ctx, addr, d, conf)
		} else if dialFn != nil {
			conn, err = dialFn(addr, d, conf)
		} else if conf != nil {
			conn, err = (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, "tcp", addr)
			err = withoutTLS(err)
		} else {
			conn, err = d.DialContext(ctx, "tcp", addr)
		}
		if err != nil {
			return nil, err
		}
		own := &ownConn{Conn: conn, written: make(chan struct{}), link: link}
		link.Opened(own)
		return own, nil
	}
	return link
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

// ownConn is a connection that blocks reads until the first write. A server that has reached
// its client limit sends an unsolicited error, and rueidis panics if it reads one on a
// connection that it closes before the first command.
//
// It also ends a request that is alone when the context of its caller ends (see Link).
type ownConn struct {
	net.Conn
	once     sync.Once
	written  chan struct{} // closed by the first Write, or Close
	link     *Link
	alone    *Alone    // the request of the last SetDeadline, or nil
	deadline time.Time // of the request that is alone
	// readBy and writeBy are the deadlines of Conn.
	readBy, writeBy time.Time
	givenUp         atomic.Pointer[error]
}

// watchAfter is the time after which a connection begins to watch the context of a request that is
// alone. Most are answered before.
const watchAfter = 20 * time.Millisecond

func (c *ownConn) unblockReads() { c.once.Do(func() { close(c.written) }) }

func (c *ownConn) Read(b []byte) (int, error) {
	<-c.written
	n, err := c.Conn.Read(b)
	if c.alone != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		return c.readUntil(c.alone.Caller, b)
	}
	return n, c.reason(err)
}

// reason returns err, or why the connection was given up.
func (c *ownConn) reason(err error) error {
	if givenUp := c.givenUp.Load(); err != nil && givenUp != nil {
		return *givenUp
	}
	return err
}

// GiveUp implements Conn.
func (c *ownConn) GiveUp(err error) {
	c.givenUp.Store(&err)
	_ = c.Close()
}

// SetDeadline implements net.Conn. rueidis calls it before each request in its synchronous mode, and
// when that ends. The deadlines of requests that are alone are not exact: to change a timer for each
// request, to a time before all others, would wake another thread.
func (c *ownConn) SetDeadline(t time.Time) error {
	if c.alone = c.link.Alone(t); c.alone == nil {
		c.readBy = t
		c.writeBy = t
		return c.Conn.SetDeadline(t)
	}

	c.deadline = t
	now := time.Now()
	if c.writeBy.Before(t) {
		c.writeBy = t.Add(t.Sub(now))
		if err := c.Conn.SetWriteDeadline(c.writeBy); err != nil {
			return err
		}
	}

	if left := c.readBy.Sub(now); left > watchAfter/2 && left <= watchAfter {
		return nil
	}

	return c.setReadDeadline(now.Add(watchAfter))
}

func (c *ownConn) setReadDeadline(t time.Time) error {
	c.readBy = t
	return c.Conn.SetReadDeadline(t)
}

// readUntil is Read for a request that is alone. It gives the connection up when the context of its
// caller ends.
func (c *ownConn) readUntil(ctx context.Context, b []byte) (int, error) {
	if err := c.setReadDeadline(c.deadline); err != nil {
		return 0, err
	}

	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.Conn.SetReadDeadline(past)
		close(ended)
	})
	n, err := c.Conn.Read(b)
	if !stop() {
		<-ended
		c.readBy = past
		if err != nil {
			err = c.alone.GiveUp()
		}
	}

	return n, err
}

// past is a deadline that ends a read at once.
var past = time.Unix(1, 0)

func (c *ownConn) Write(b []byte) (int, error) {
	c.unblockReads()
	n, err := c.Conn.Write(b)
	return n, c.reason(err)
}

func (c *ownConn) Close() error {
	c.link.Closed(c)
	c.unblockReads()
	return c.Conn.Close()
}

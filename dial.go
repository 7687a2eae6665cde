package redlatch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// ownConns makes the connections of opt ours. inFlight is the number of requests in flight.
func ownConns(opt *rueidis.ClientOption, inFlight *atomic.Int32) {
	if opt.DisableTCPNoDelay {
		return // rueidis needs the bare connection
	}
	dial, dialFn := opt.DialCtxFn, opt.DialFn
	opt.DialCtxFn = func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (conn net.Conn, err error) {
		switch {
		case dial != nil:
			conn, err = dial(ctx, addr, d, conf)
		case dialFn != nil:
			conn, err = dialFn(addr, d, conf)
		case conf != nil:
			conn, err = (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, "tcp", addr)
			err = withoutTLS(err)
		default:
			conn, err = d.DialContext(ctx, "tcp", addr)
		}
		if err != nil {
			return nil, err
		}
		return &ownConn{Conn: conn, written: make(chan struct{}), inFlight: inFlight}, nil
	}
}

// withoutTLS adds to the error of a TLS connection that the server may not use TLS. Such a
// server answers the handshake with an error reply, or waits for the rest of a command.
func withoutTLS(err error) error {
	var reply tls.RecordHeaderError
	switch {
	case errors.As(err, &reply):
		return fmt.Errorf("%w: the server does not use TLS on this port", err)
	case err == context.DeadlineExceeded: // a timeout of the TCP connection is a *net.OpError
		return fmt.Errorf("%w: no answer to the TLS handshake: the server may not use TLS on this port", err)
	default:
		return err
	}
}

// ownConn is a connection that blocks reads until the first write. A server that has reached
// its client limit sends an unsolicited error, and rueidis panics if it reads one on a
// connection that it closes before the first command.
//
// It also delays writes while many requests are in flight. The writer of rueidis is woken by the
// first caller that has got its reply, and would send that caller's next request alone. A moment
// later the other callers have added theirs. One system call for all of them costs this process
// and the server half of the processor time. MaxFlushDelay of rueidis does the same, but also when
// only a few callers share the connection, and makes those slower.
type ownConn struct {
	net.Conn
	once     sync.Once
	written  chan struct{} // closed by the first Write, or Close
	inFlight *atomic.Int32
}

const (
	// manyInFlight is the number of requests in flight from which on a write is delayed, and
	// minRequest less than the bytes of a request: a write of fewer bytes for each of those in
	// flight is one for a few of them.
	manyInFlight = 32
	minRequest   = 20
	writeDelay   = 10 * time.Microsecond
)

func (c *ownConn) unblockReads() { c.once.Do(func() { close(c.written) }) }

func (c *ownConn) Read(b []byte) (int, error) {
	<-c.written
	return c.Conn.Read(b)
}

func (c *ownConn) Write(b []byte) (int, error) {
	c.unblockReads()
	if n := int(c.inFlight.Load()); n >= manyInFlight && len(b) < n*minRequest {
		time.Sleep(writeDelay)
	}
	return c.Conn.Write(b)
}

func (c *ownConn) Close() error {
	c.unblockReads()
	return c.Conn.Close()
}

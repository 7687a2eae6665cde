package redlatch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/redis/rueidis"
)

// writeFirst makes the connections of opt block reads until the first write. A server
// that has reached its client limit sends an unsolicited error, and rueidis panics if
// it reads one on a connection that it closes before the first command.
func writeFirst(opt *rueidis.ClientOption) {
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
		return &writeFirstConn{Conn: conn, written: make(chan struct{})}, nil
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

type writeFirstConn struct {
	net.Conn
	once    sync.Once
	written chan struct{} // closed by the first Write, or Close
}

func (c *writeFirstConn) unblockReads() { c.once.Do(func() { close(c.written) }) }

func (c *writeFirstConn) Read(b []byte) (int, error) {
	<-c.written
	return c.Conn.Read(b)
}

func (c *writeFirstConn) Write(b []byte) (int, error) {
	c.unblockReads()
	return c.Conn.Write(b)
}

func (c *writeFirstConn) Close() error {
	c.unblockReads()
	return c.Conn.Close()
}

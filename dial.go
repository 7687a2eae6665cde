package redlatch

import (
	"context"
	"crypto/tls"
	"net"
	"sync"

	"github.com/redis/rueidis"
)

// polite lets connections of opt hear nothing before they have said something. A
// server that has no place for another client says so unasked, and rueidis panics
// if it reads that on a connection it gives up before its first command is sent.
func polite(opt *rueidis.ClientOption) {
	if opt.DisableTCPNoDelay {
		return // rueidis looks for the bare connection then
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
		default:
			conn, err = d.DialContext(ctx, "tcp", addr)
		}
		if err != nil {
			return nil, err
		}
		return &politeConn{Conn: conn, spoken: make(chan struct{})}, nil
	}
}

type politeConn struct {
	net.Conn
	once   sync.Once
	spoken chan struct{} // closed by the first Write, or Close
}

func (c *politeConn) speak() { c.once.Do(func() { close(c.spoken) }) }

func (c *politeConn) Read(b []byte) (int, error) {
	<-c.spoken
	return c.Conn.Read(b)
}

func (c *politeConn) Write(b []byte) (int, error) {
	c.speak()
	return c.Conn.Write(b)
}

func (c *politeConn) Close() error {
	c.speak()
	return c.Conn.Close()
}

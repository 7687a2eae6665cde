package main

import (
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
)

// roundTrip is that of a distant server. It is so long that everything else takes no time.
const roundTrip = 50 * time.Millisecond

// starts connects to a distant server and acquires a lock. The time that takes tells how many
// round trips follow one another; those at the same time count once.
func starts(ctx context.Context, t task, _ service) (job, error) {
	if err := connectAndLock(ctx, t, t.Name+"-warm"); err != nil { // loads the scripts
		return nil, err
	}
	return func() (*outcome, error) {
		began := time.Now()
		err := connectAndLock(ctx, t, t.Name)
		took := time.Since(began)
		return &outcome{Elapsed: took, Trips: int(took / roundTrip), Shares: []int{1}}, err
	}, nil
}

// connectAndLock leaves the lock to its lease, and the connection to the end of the process.
func connectAndLock(ctx context.Context, t task, name string) error {
	opt := floorOptions(t.Addrs...)
	opt.DialCtxFn = dialDistant
	var s service
	switch t.Peer {
	case "floor":
		conn, err := rueidis.NewClient(opt)
		if err != nil {
			return err
		}
		s = &floor{conn: conn}
	case us:
		c, err := redlatch.New(ctx, opt)
		if err != nil {
			return err
		}
		s = &ours{clients: []*redlatch.Client{c}}
	default:
		return unsupported(t)
	}
	op, err := s.operation(ctx, t, name)
	if err != nil {
		return err
	}
	return op.acquire(ctx)
}

// distant is a connection to a distant server: a reply arrives a round trip after its request.
type distant struct {
	net.Conn
	sent atomic.Int64
}

func dialDistant(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
	time.Sleep(roundTrip)
	conn, err := d.DialContext(ctx, "tcp", addr)
	return &distant{Conn: conn}, err
}

func (c *distant) Write(b []byte) (int, error) {
	c.sent.Store(monotonic())
	return c.Conn.Write(b)
}

func (c *distant) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	time.Sleep(roundTrip - time.Duration(monotonic()-c.sent.Load()))
	return n, err
}

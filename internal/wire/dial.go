package wire

import (
	"context"
	"net"
	"sync"
)

// dials has what a Link knows of callers that wait in rueidis, and of connections that are being made.
// rueidis has every request wait for the connection, and heeds no context meanwhile. So the only caller
// with a context that can end that may wait in rueidis takes no part in that: it begins only if no
// connection is being made, and if its context ends, all connections that it may wait for are given up.
type dials struct {
	mu     sync.Mutex
	caller context.Context // of the request that waits in rueidis, or nil
	making int             // connections
	late   []*Dial         // that began while caller waited
}

// stay reports whether a caller with that context may wait in rueidis. If so, leave must be called
// afterwards.
func (l *Link) stay(ctx context.Context) bool {
	if !l.Direct {
		return false
	}
	l.dials.mu.Lock()
	defer l.dials.mu.Unlock()
	if l.dials.caller != nil || l.dials.making > 0 {
		return false
	}
	l.dials.caller = ctx
	return true
}

func (l *Link) left() {
	l.dials.mu.Lock()
	defer l.dials.mu.Unlock()
	l.dials.caller = nil
	for i, d := range l.dials.late {
		d.stop()
		l.dials.late[i] = nil
	}
	l.dials.late = l.dials.late[:0]
}

// Dial is the making of a connection. It lasts until the first request, because rueidis introduces
// itself before that.
type Dial struct {
	link    *Link
	givenUp context.Context
	cancel  context.CancelFunc
	over    bool
	stop    func() bool // keeps the end of the caller's context from giving the connection up
}

// Dial begins to make a connection.
func (l *Link) Dial() *Dial {
	d := &Dial{link: l}
	d.givenUp, d.cancel = context.WithCancel(context.Background())
	l.dials.mu.Lock()
	defer l.dials.mu.Unlock()
	l.dials.making++
	if l.dials.caller != nil {
		d.stop = context.AfterFunc(l.dials.caller, d.giveUp)
		l.dials.late = append(l.dials.late, d)
	}
	return d
}

// Connect calls connect, whose context ends when the connection is given up. connect may ignore that.
func (d *Dial) Connect(ctx context.Context, connect func(context.Context) (net.Conn, error)) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	ctx, cancel := context.WithCancel(ctx)
	connected := make(chan result, 1)
	go func() {
		defer cancel()
		conn, err := connect(ctx)
		connected <- result{conn, err}
	}()
	select {
	case r := <-connected:
		if r.err == nil {
			context.AfterFunc(d.givenUp, func() { _ = r.conn.Close() })
			return r.conn, nil
		}
		_ = d.End()
		return nil, d.Err(r.err)
	case <-d.givenUp.Done():
		cancel()
		go func() {
			if r := <-connected; r.err == nil {
				_ = r.conn.Close()
			}
		}()
		return nil, d.End()
	}
}

func (d *Dial) giveUp() {
	d.link.dials.mu.Lock()
	defer d.link.dials.mu.Unlock()
	if !d.over { // otherwise it has requests
		d.cancel()
	}
}

// Err returns err, or another error if it is because the connection was given up.
func (d *Dial) Err(err error) error {
	if err != nil && d.givenUp.Err() != nil {
		return errGivenUp
	}
	return err
}

// End notes that the connection is made, or has failed. It returns an error if it was given up.
func (d *Dial) End() error {
	d.link.dials.mu.Lock()
	defer d.link.dials.mu.Unlock()
	if !d.over {
		d.over = true
		d.link.dials.making--
	}
	return d.Err(d.givenUp.Err())
}

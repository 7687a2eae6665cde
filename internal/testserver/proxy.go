package testserver

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"
)

// Fault is a set of faults of the connections through a Proxy.
type Fault int

// The faults.
const (
	// StallRequests and StallReplies let nothing arrive at the server or at the client. What was sent, the end of a
	// connection included, arrives when the fault is over.
	StallRequests Fault = 1 << iota
	StallReplies
	// Mute drops what the server sends, on each connection that there is or that begins, and until that connection ends: the
	// client would not understand the rest.
	Mute
	// Refuse ends new connections at once, and none that there are.
	Refuse

	Pass  Fault = 0
	Stall       = StallRequests | StallReplies
)

// Proxy is a TCP proxy in front of any server.
type Proxy struct {
	Addr string // for clients

	to   string
	ctx  context.Context // ends with the test
	work sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond
	faults  Fault
	links   map[*link]struct{}
}

// link is a connection of a client.
type link struct {
	client net.Conn

	// The mutex of the proxy guards what follows.
	mute bool
	cut  bool
}

// NewProxy starts a proxy in front of the server at an address. The end of the test closes it.
func NewProxy(t testing.TB, to string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	p := &Proxy{Addr: l.Addr().String(), to: to, links: make(map[*link]struct{})}
	p.changed = sync.NewCond(&p.mu)
	ctx, cancel := context.WithCancel(context.Background())
	p.ctx = ctx
	p.work.Go(func() { p.accept(l) })
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		p.Down()
		p.work.Wait()
	})
	return p
}

// Set sets the faults from now on. Pass undoes all.
func (p *Proxy) Set(faults Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = faults
	for l := range p.links {
		l.mute = l.mute || faults&Mute != 0
	}
	p.changed.Broadcast()
}

// lag is how much later than the client the server hears that a connection was cut, as happens in a network. A client that
// connects again finds the server with what it has of the old connection.
const lag = 100 * time.Millisecond

// Cut ends all connections. What has not arrived is lost.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.cut = true
		_ = l.client.Close()
	}
	p.changed.Broadcast()
}

// Down ends all connections and refuses new ones.
func (p *Proxy) Down() {
	p.Set(Refuse)
	p.Cut()
}

func (p *Proxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		p.work.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	l := p.admit(client)
	if l == nil {
		return
	}
	defer p.forget(l)
	var d net.Dialer
	server, err := d.DialContext(p.ctx, "tcp", p.to)
	if err != nil {
		return
	}
	defer context.AfterFunc(p.ctx, func() { _ = server.Close() })() // it may not read

	var replies sync.WaitGroup
	replies.Go(func() {
		p.copy(l, client, server, StallReplies)
		_ = client.Close()
	})
	if cut := p.copy(l, server, client, StallRequests); cut {
		select {
		case <-time.After(lag):
		case <-p.ctx.Done():
		}
	}
	_ = server.Close()
	replies.Wait()
}

// admit notes a connection. It returns nil if the proxy refuses it.
func (p *Proxy) admit(client net.Conn) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.faults&Refuse != 0 {
		return nil
	}
	l := &link{client: client, mute: p.faults&Mute != 0}
	p.links[l] = struct{}{}
	return l
}

func (p *Proxy) forget(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// copy copies one direction, which stall stops, until an end is closed. It reports whether the connection was cut.
func (p *Proxy) copy(l *link, to, from net.Conn, stall Fault) bool {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		p.mu.Lock()
		for p.faults&stall != 0 && !l.cut {
			p.changed.Wait()
		}
		cut := l.cut
		drop := l.mute && stall == StallReplies
		p.mu.Unlock()

		if cut {
			return true
		}
		if !drop && n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return false
			}
		}
		if err != nil {
			return false
		}
	}
}

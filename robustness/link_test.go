package robustness

import (
	"net"
	"sync"
	"time"
)

// link is the network between a worker and the server. It can be cut, it can lose replies, and it
// can delay data, which then arrives late even if the sender has left.
type link struct {
	listener net.Listener
	server   string
	rewrite  func(request []byte) []byte // nil: none

	mu      sync.Mutex
	conns   map[net.Conn]bool
	stalled chan struct{} // closed when data flows again; nil if it does
	delay   time.Duration // of all data
	lose    int           // as many replies are lost next, each with its connection

	done sync.WaitGroup
}

// newLink returns a link to a server. It works until close.
func newLink(server string, rewrite func([]byte) []byte) (*link, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &link{listener: listener, server: server, rewrite: rewrite, conns: map[net.Conn]bool{}}
	l.done.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			l.done.Go(func() { l.connect(client) })
		}
	})
	return l, nil
}

func (l *link) addr() string { return l.listener.Addr().String() }

// connect serves one connection of a client until either side ends it.
func (l *link) connect(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", l.server)
	if err != nil {
		return
	}
	defer server.Close()
	l.mu.Lock()
	l.conns[client], l.conns[server] = true, true
	l.mu.Unlock()
	var replies sync.WaitGroup
	replies.Go(func() { l.pump(client, server, nil, true) })
	l.pump(server, client, l.rewrite, false)
	replies.Wait()
	l.mu.Lock()
	delete(l.conns, client)
	delete(l.conns, server)
	l.mu.Unlock()
}

func (l *link) pump(to, from net.Conn, rewrite func([]byte) []byte, replies bool) {
	defer to.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		l.mu.Lock()
		stalled, delay, lost := l.stalled, l.delay, replies && err == nil && l.lose > 0
		if lost {
			l.lose--
		}
		l.mu.Unlock()
		if lost {
			return
		}
		if stalled != nil {
			<-stalled
		}
		time.Sleep(delay)
		b := buf[:n]
		if rewrite != nil {
			b = rewrite(b)
		}
		if _, errTo := to.Write(b); err != nil || errTo != nil {
			return
		}
	}
}

// cut breaks all connections. Data under way is lost.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for conn := range l.conns {
		conn.Close()
	}
}

// loseReplies loses the next n replies, and breaks the connection of each.
func (l *link) loseReplies(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lose = n
}

// slow delays all data by d.
func (l *link) slow(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = d
}

// stall delays all data until resume.
func (l *link) stall() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stalled == nil {
		l.stalled = make(chan struct{})
	}
}

func (l *link) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stalled != nil {
		close(l.stalled)
		l.stalled = nil
	}
}

func (l *link) close() {
	l.listener.Close()
	l.cut()
	l.resume()
	l.done.Wait()
}

package robustness

import (
	"net"
	"sync"
	"time"
)

// link is the network between a worker and the server. It can be long, it can be cut, it can lose
// replies, and it can delay data, which then arrives late even if the sender has left.
type link struct {
	listener net.Listener
	server   string
	rewrite  func(request []byte) []byte // nil: none

	mu      sync.Mutex
	conns   map[net.Conn]bool
	stalled chan struct{} // closed when data flows again; nil if it does
	silent  bool          // all data is lost, and each connection whose data was lost breaks afterwards
	rtt     time.Duration // the round trip of a far client
	delay   time.Duration // of all data, besides
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

// parcel is data under way.
type parcel struct {
	data []byte
	due  time.Time
	last bool // the sender has closed the connection
}

// pump sends what it reads from one side to the other.
func (l *link) pump(to, from net.Conn, rewrite func([]byte) []byte, replies bool) {
	line := make(chan parcel, 1024)
	var deliveries sync.WaitGroup
	deliveries.Go(func() { l.deliver(to, line) })
	defer deliveries.Wait()
	defer close(line)
	for {
		buf := make([]byte, 32<<10)
		n, err := from.Read(buf)
		l.mu.Lock()
		stalled, silent := l.stalled, l.silent
		delay := l.delay + l.rtt/2
		lost := replies && err == nil && l.lose > 0
		if lost {
			l.lose--
		}
		l.mu.Unlock()
		switch {
		case lost:
			return
		case silent && err == nil:
			// What follows on this connection is lost too.
			l.waitForSound()
			return
		case stalled != nil:
			<-stalled
		}
		b := buf[:n]
		if rewrite != nil {
			b = rewrite(b)
		}
		line <- parcel{b, time.Now().Add(delay), err != nil}
		if err != nil {
			return
		}
	}
}

// deliver delivers data when it is due, and closes the connection after the last.
func (l *link) deliver(to net.Conn, line <-chan parcel) {
	defer func() {
		to.Close()
		for range line { // the sender may still send
		}
	}()
	for p := range line {
		time.Sleep(time.Until(p.due))
		if _, err := to.Write(p.data); err != nil || p.last {
			return
		}
	}
}

// waitForSound waits until the link is not silent.
func (l *link) waitForSound() {
	for silent := true; silent; {
		time.Sleep(time.Millisecond)
		l.mu.Lock()
		silent = l.silent
		l.mu.Unlock()
	}
}

// silence loses all data, or ends that.
func (l *link) silence(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.silent = on
}

// far sets the round trip.
func (l *link) far(rtt time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rtt = rtt
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
	l.silence(false)
	l.cut()
	l.resume()
	l.done.Wait()
}

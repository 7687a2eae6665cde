package zklock

import (
	"encoding/binary"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"
)

// Session observes the session of one connection to ZooKeeper, through the dialer of that connection. A *zk.Conn does not
// say which timeout the server has granted, and until when a hold is certain depends on that. The server may grant less
// than the program asks for.
type Session struct {
	dial zk.Dialer

	mu      sync.Mutex
	now     sessionState
	conn    *conn         // the latest
	changed chan struct{} // closed when now changes
	stores  map[*store]struct{}
}

// sessionState is what a Session knows.
type sessionState struct {
	number    uint64        // counts the sessions, and their ends
	id        int64         // 0: there is none
	timeout   time.Duration // that the server has granted
	connected bool
	closed    bool // the program has closed the connection to ZooKeeper
}

// NewSession returns a Session for one connection, whose dialer is the method Dial:
//
//	session := zklock.NewSession(nil)
//	conn, events, err := zk.Connect(servers, 10*time.Second, zk.WithDialer(session.Dial))
//
// dial opens the connections to the servers, with TLS for example. If it is nil, net.DialTimeout does.
func NewSession(dial zk.Dialer) *Session {
	if dial == nil {
		dial = net.DialTimeout
	}
	return &Session{dial: dial, changed: make(chan struct{}), stores: make(map[*store]struct{})}
}

// Dial is the dialer of the connection. It blocks for timeout at most if the dialer of NewSession does.
func (s *Session) Dial(network, address string, timeout time.Duration) (net.Conn, error) {
	server, err := s.dial(network, address, timeout)
	if err != nil {
		return nil, err
	}

	c := &conn{Conn: server, s: s}
	s.mu.Lock()
	previous := s.conn
	s.conn = c
	s.mu.Unlock()
	s.update(c, func(now *sessionState) { now.connected = false })
	if previous != nil {
		_ = previous.Close() // go-zookeeper does not close the connection that has ended a session
	}
	return c, nil
}

// state returns what the session knows now, and a channel that is closed when that changes.
func (s *Session) state() (sessionState, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now, s.changed
}

// update changes the state, if c is the latest connection.
func (s *Session) update(c *conn, change func(now *sessionState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != c {
		return
	}

	before := s.now
	change(&s.now)
	if s.now != before {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// attach has the claims of a store end before the program ends the session.
func (s *Session) attach(st *store) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stores[st] = struct{}{}
}

// detach undoes attach.
func (s *Session) detach(st *store) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.stores, st)
}

// close ends the claims of all stores, because the connection is about to end the session.
func (s *Session) close(c *conn) {
	s.update(c, func(now *sessionState) {
		*now = sessionState{number: now.number + 1, timeout: now.timeout, closed: true}
	})
	s.mu.Lock()
	now := s.now
	stores := slices.Collect(maps.Keys(s.stores))
	s.mu.Unlock()
	for _, st := range stores {
		st.expire(now, nil)
	}
}

// established notes the answer of the server to a connect request. The id is 0 if the session has ended.
func (s *Session) established(c *conn, id int64, timeout time.Duration) {
	s.update(c, func(now *sessionState) {
		if id == 0 || id != now.id {
			now.number++
		}
		now.id = id
		now.connected = id != 0
		if id != 0 {
			now.timeout = timeout
		}
	})
}

// cut closes the connection, so that the client connects to the next server.
func (s *Session) cut() {
	s.mu.Lock()
	c := s.conn
	s.mu.Unlock()
	if c != nil {
		_ = c.Close()
	}
}

// conn is a connection to a server. It reads the begin of the protocol along: each packet begins with its length, the
// first ones are a connect request and the answer to it, and the others are requests, with a number and a type, and
// replies. go-zookeeper writes each packet with one call.
type conn struct {
	net.Conn
	s *Session

	asked     bool          // the connect request is written
	requested time.Duration // its session timeout
	answer    []byte        // begin of the answer to it
	greeted   bool          // the answer is complete
}

const (
	timeoutInRequest = 16 // length, version and last transaction precede it
	timeoutInAnswer  = 8  // length and version precede it
	answerSize       = 20 // with the id, without the password
	typeInRequest    = 8  // length and number precede it
	closeSession     = -11
)

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	if !c.asked {
		c.asked = true
		if len(p) >= timeoutInRequest+4 {
			c.requested = milliseconds(p[timeoutInRequest:])
		}
	} else if len(p) >= typeInRequest+4 && int32(binary.BigEndian.Uint32(p[typeInRequest:])) == closeSession {
		c.s.close(c) // what the session holds is free as soon as the server has read this
	}
	return c.Conn.Write(p)
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.greeted {
		return n, err
	}

	c.answer = append(c.answer, p[:n]...)
	if len(c.answer) >= answerSize {
		c.greeted = true
		id := int64(binary.BigEndian.Uint64(c.answer[answerSize-8:]))
		c.s.established(c, id, milliseconds(c.answer[timeoutInAnswer:]))
		c.answer = nil
	}
	return n, err
}

// SetReadDeadline implements net.Conn. go-zookeeper waits for the answer to its connect request for far longer than the
// session lasts. A server that is stopped, but whose kernel accepts connections, would cost the session, even if other
// servers are fine.
func (c *conn) SetReadDeadline(t time.Time) error {
	if !c.greeted && t.IsZero() {
		return nil // go-zookeeper would wait for the rest of the answer for ever
	}
	if !c.greeted && c.requested > 0 {
		if patience := time.Now().Add(max(c.requested/3, minPatience)); t.After(patience) {
			t = patience
		}
	}
	return c.Conn.SetReadDeadline(t)
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.s.update(c, func(now *sessionState) { now.connected = false })
	return c.Conn.Close()
}

func milliseconds(p []byte) time.Duration {
	return time.Duration(int32(binary.BigEndian.Uint32(p))) * time.Millisecond
}

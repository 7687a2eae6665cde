package harness

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
)

// Fault is a fault of a request or of its reply.
type Fault int

// The faults.
const (
	// LoseRequest breaks the connection instead of delivering the request.
	LoseRequest Fault = iota
	// DelayRequest is LoseRequest, but Open delivers the request.
	DelayRequest
	// LoseReply breaks the connection instead of delivering the reply.
	LoseReply
	// KeepReply delays the reply and everything after it on that connection until Open.
	KeepReply
	// Silence drops the reply and everything after it on that connection, which stays open.
	Silence
	// Repeat delivers the request twice and forwards the first reply.
	Repeat
	// Resend delivers the request twice and forwards the second reply, like a retry after a
	// lost reply.
	Resend
	// Echo forwards request and reply, and Open delivers the request a second time.
	Echo
)

// Faults are all faults except Echo: a request need not be safe against a duplicate that arrives
// after its reply.
var Faults = []Fault{LoseRequest, DelayRequest, LoseReply, KeepReply, Silence, Repeat, Resend}

func (f Fault) String() string {
	return [...]string{"request lost", "request delayed", "reply lost", "reply delayed", "silence", "repeated", "resent", "echoed"}[f]
}

// Unknown reports whether the client gets no reply.
func (f Fault) Unknown() bool {
	return f == LoseRequest || f == DelayRequest || f == LoseReply || f == Silence
}

// Gate is a proxy in front of a server. It forwards everything except one request that Arm marks,
// messages after Mute, and everything between Stall and Open.
type Gate struct {
	Addr string // for clients

	server   string
	listener net.Listener
	done     sync.WaitGroup

	mu      sync.Mutex
	conns   map[*gateConn]struct{}
	fault   Fault
	match   []byte // nil if no request is marked
	skip    int
	reached chan struct{}
	opened  chan struct{} // closed by Open
	delayed []byte        // the request that Open delivers
	stalled chan struct{} // opened at the time of Stall, nil if not stalled
	mute    bool
	closed  bool
	scripts int
}

// NewGate returns a gate in front of s. The end of the test closes it.
func NewGate(t testing.TB, s *testserver.Server) *Gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	g := &Gate{
		Addr: l.Addr().String(), server: s.Addr, listener: l,
		conns: make(map[*gateConn]struct{}), opened: make(chan struct{}),
	}
	g.done.Go(g.accept)
	t.Cleanup(g.close)
	return g
}

// GatedClient returns a client and the gate that it connects through.
func GatedClient(t testing.TB, s *testserver.Server, opts ...redlatch.Option) (*redlatch.Client, *Gate) {
	t.Helper()
	g := NewGate(t, s)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{g.Addr}}, opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	t.Cleanup(func() { g.open() })
	return c, g
}

// Redirect ends the connections; new ones go to s.
func (g *Gate) Redirect(s *testserver.Server) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.server = s.Addr
	for c := range g.conns {
		c.close()
	}
}

// Arm marks the n-th request from now, starting at 1, that contains match. The channel is closed
// when the fault has occurred; if the server gets the request, after the server has run it.
func (g *Gate) Arm(f Fault, match string, n int) (reached <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fault, g.match, g.skip, g.reached = f, []byte(match), n-1, make(chan struct{})
	return g.reached
}

// Reached blocks until a fault has occurred.
func Reached(t testing.TB, reached <-chan struct{}) {
	t.Helper()
	select {
	case <-reached:
	case <-time.After(20 * time.Second):
		require.FailNow(t, "the request was not sent")
	}
}

// Keep delays the reply to the n-th request that contains match. It calls begin, which causes the
// request, and returns when the server has sent the reply.
func (g *Gate) Keep(t testing.TB, match string, n int, begin func()) {
	t.Helper()
	reached := g.Arm(KeepReply, match, n)
	begin()
	Reached(t, reached)
}

// During runs an operation with a fault of its first request that contains match, and returns when
// the operation has ended. A delayed reply arrives meanwhile, a delayed request at Open.
func (g *Gate) During(t testing.TB, f Fault, match string, operation func()) {
	t.Helper()
	reached := g.Arm(f, match, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		operation()
	}()
	Reached(t, reached)
	if f == KeepReply {
		require.NoError(t, g.Open())
	}
	select {
	case <-done:
	case <-time.After(time.Minute):
		require.FailNow(t, "the operation hangs")
	}
}

// Scripts returns the number of script calls so far.
func (g *Gate) Scripts() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.scripts
}

// Mute drops every message to a subscriber from now on. Subscriptions are still confirmed.
func (g *Gate) Mute() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mute = true
}

// Stall delays everything until Open, in both directions and also on new connections, like a
// network partition.
func (g *Gate) Stall() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stalled = g.opened
}

// passing blocks while the gate is stalled.
func (g *Gate) passing() {
	g.mu.Lock()
	stalled := g.stalled
	g.mu.Unlock()
	if stalled != nil {
		<-stalled
	}
}

// Open forwards everything, including what was delayed, and blocks until a delayed request has been
// delivered.
func (g *Gate) Open() error {
	if request := g.open(); request != nil {
		return g.deliver(request)
	}
	return nil
}

func (g *Gate) open() (delayed []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delayed = g.delayed
	g.match, g.delayed, g.stalled = nil, nil, nil
	close(g.opened)
	g.opened = make(chan struct{})
	return delayed
}

// deliver sends a request on a new connection and waits for the reply.
func (g *Gate) deliver(request []byte) error {
	conn, err := net.Dial("tcp", g.server)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write(request); err != nil {
		return err
	}
	_, err = readValue(bufio.NewReader(conn))
	return err
}

func (g *Gate) close() {
	g.open()
	g.mu.Lock()
	g.closed = true
	for c := range g.conns {
		c.close()
	}
	g.mu.Unlock()
	g.listener.Close()
	g.done.Wait()
}

func (g *Gate) accept() {
	for {
		client, err := g.listener.Accept()
		if err != nil {
			return
		}
		g.mu.Lock()
		addr := g.server
		g.mu.Unlock()
		server, err := net.Dial("tcp", addr)
		if err != nil { // the server is down
			client.Close()
			continue
		}
		c := &gateConn{g: g, client: client, server: server}
		g.mu.Lock()
		if g.closed {
			c.close()
		} else {
			g.conns[c] = struct{}{}
			g.done.Go(c.up)
			g.done.Go(c.down)
		}
		g.mu.Unlock()
	}
}

// marks reports whether a request is the marked one. The caller holds g.mu.
func (g *Gate) marks(request []byte) bool {
	if g.match == nil || !bytes.Contains(request, g.match) {
		return false
	}
	if g.skip > 0 {
		g.skip--
		return false
	}
	g.match = nil
	return true
}

// gateConn is one connection through the gate.
type gateConn struct {
	g              *Gate
	client, server net.Conn

	// The gate's mutex guards the fields below.
	sent, got int // requests and replies
	marked    int // index of the reply to the marked request, from 1; 0 for none
	fault     Fault
	request   []byte
	reached   chan struct{}
}

func (c *gateConn) close() {
	c.client.Close()
	c.server.Close()
}

// up forwards requests.
func (c *gateConn) up() {
	defer func() {
		c.close()
		c.g.mu.Lock()
		delete(c.g.conns, c)
		c.g.mu.Unlock()
	}()
	for r := bufio.NewReader(c.client); ; {
		request, err := readValue(r)
		if err != nil || !c.passUp(request) {
			return
		}
		c.g.passing()
		if _, err := c.server.Write(request); err != nil {
			return
		}
	}
}

// passUp applies a fault to a request and reports whether to forward it.
func (c *gateConn) passUp(request []byte) bool {
	g := c.g
	g.mu.Lock()
	c.sent++
	if bytes.Contains(request, []byte("\r\nEVAL")) {
		g.scripts++
	}
	if !g.marks(request) {
		g.mu.Unlock()
		return true
	}
	fault, reached := g.fault, g.reached
	if fault == DelayRequest || fault == Echo {
		g.delayed = request
	}
	switch fault {
	case LoseRequest, DelayRequest, Resend:
	default:
		c.marked, c.fault, c.request, c.reached = c.sent, fault, request, reached
		g.mu.Unlock()
		return true
	}
	g.mu.Unlock()
	defer close(reached)
	if fault == Resend {
		return g.deliver(request) == nil
	}
	c.close()
	return false
}

// down forwards replies and messages.
func (c *gateConn) down() {
	defer c.close()
	for r := bufio.NewReader(c.server); ; {
		reply, err := readValue(r)
		if err != nil {
			return
		}
		if !c.passDown(reply) {
			continue
		}
		c.g.passing()
		if _, err := c.client.Write(reply); err != nil {
			return
		}
	}
}

// passDown applies a fault to a reply or message and reports whether to forward it.
func (c *gateConn) passDown(reply []byte) bool {
	g := c.g
	g.mu.Lock()
	if bytes.HasPrefix(reply, []byte(">3\r\n$7\r\nmessage\r\n")) {
		defer g.mu.Unlock()
		silent := c.fault == Silence && c.marked > 0 && c.got >= c.marked
		return !silent && !g.mute
	}
	c.got++
	if c.marked == 0 || c.got < c.marked {
		g.mu.Unlock()
		return true
	}
	first, fault, request, reached, opened := c.got == c.marked, c.fault, c.request, c.reached, g.opened
	g.mu.Unlock()
	pass := fault == KeepReply || fault == Repeat || fault == Echo
	if !first {
		return pass
	}
	switch fault {
	case LoseReply:
		c.close()
	case Repeat:
		pass = g.deliver(request) == nil
	}
	close(reached)
	if fault == KeepReply {
		<-opened
	}
	return pass
}

// readValue reads one RESP value, unparsed.
func readValue(r *bufio.Reader) ([]byte, error) {
	value, err := r.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	if len(value) < 3 {
		return nil, fmt.Errorf("harness: not RESP: %q", value)
	}
	kind, line := value[0], value[1:len(value)-2]
	switch kind {
	case '+', '-', ':', '_', ',', '#', '(':
		return value, nil
	}
	n, err := strconv.Atoi(string(line))
	if err != nil {
		return nil, fmt.Errorf("harness: not RESP: %q", value)
	}
	switch kind {
	case '$', '=', '!':
		if n < 0 {
			return value, nil
		}
		value = append(value, make([]byte, n+2)...)
		_, err := io.ReadFull(r, value[len(value)-n-2:])
		return value, err
	case '%':
		n *= 2
	}
	for range n {
		element, err := readValue(r)
		if err != nil {
			return nil, err
		}
		value = append(value, element...)
	}
	return value, nil
}

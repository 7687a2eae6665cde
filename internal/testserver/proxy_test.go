package testserver

import (
	"bufio"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// echo starts a server that sends back each line, and tells which lines it got.
func echo(t *testing.T) (addr string, got <-chan string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	lines := make(chan string, 10)
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() {
				defer c.Close()
				for s := bufio.NewScanner(c); s.Scan(); {
					lines <- s.Text()
					_, _ = c.Write(append(s.Bytes(), '\n'))
				}
				lines <- "end"
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		work.Wait()
	})
	return l.Addr().String(), lines
}

// peer is a connection of a client.
type peer struct {
	t *testing.T
	net.Conn
	r *bufio.Reader
}

func dial(t *testing.T, p *Proxy) peer {
	c, err := net.Dial("tcp", p.Addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return peer{t, c, bufio.NewReader(c)}
}

func (p peer) send(line string) {
	_, err := io.WriteString(p, line+"\n")
	require.NoError(p.t, err)
}

// hears returns the next line, or "" if none comes.
func (p peer) hears(within time.Duration) string {
	require.NoError(p.t, p.SetReadDeadline(time.Now().Add(within)))
	line, _, _ := p.r.ReadLine()
	return string(line)
}

// ends fails the test unless the connection ends without a line.
func (p peer) ends() {
	require.NoError(p.t, p.SetReadDeadline(time.Now().Add(soon)))
	_, err := p.r.ReadByte()
	require.Error(p.t, err)
	require.NotErrorIs(p.t, err, os.ErrDeadlineExceeded)
}

func next(t *testing.T, got <-chan string) string {
	select {
	case line := <-got:
		return line
	case <-time.After(10 * time.Second):
		require.FailNow(t, "the server got nothing")
		return ""
	}
}

const (
	soon   = 10 * time.Second
	moment = 50 * time.Millisecond // in which something would have come
)

func TestProxy(t *testing.T) {
	addr, got := echo(t)
	p := NewProxy(t, addr)
	c := dial(t, p)
	c.send("passes")
	assert.Equal(t, "passes", next(t, got))
	assert.Equal(t, "passes", c.hears(soon))

	p.Set(StallRequests)
	c.send("late")
	assert.Empty(t, c.hears(moment))
	assert.Empty(t, got)
	p.Set(StallReplies)
	assert.Equal(t, "late", next(t, got))
	assert.Empty(t, c.hears(moment))
	p.Set(Refuse) // not of this connection
	assert.Equal(t, "late", c.hears(soon))
	dial(t, p).ends()

	p.Set(Mute)
	p.Set(Pass) // it stays mute
	c.send("mute")
	assert.Equal(t, "mute", next(t, got))
	assert.Empty(t, c.hears(moment))

	p.Set(Stall)
	c.send("closed")
	_ = c.Close()
	other := dial(t, p)
	other.send("kept")
	time.Sleep(moment)
	assert.Empty(t, got, "the server does not hear of the end")
	p.Set(Pass)
	assert.ElementsMatch(t, []string{"closed", "end", "kept"}, []string{next(t, got), next(t, got), next(t, got)})
	assert.Equal(t, "kept", other.hears(soon))

	p.Set(Stall)
	other.send("cut")
	time.Sleep(moment)
	p.Cut()
	other.ends()
	assert.Equal(t, "end", next(t, got), "what has not arrived is lost")
	p.Down()
	dial(t, p).ends()
}

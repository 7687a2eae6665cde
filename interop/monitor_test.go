package interop

import (
	"bufio"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
)

// monitor lists the commands that a server runs.
type monitor struct {
	addr string
	mu   sync.Mutex
	seen []monitored // except those returned by since
}

// monitored is a command run by a server.
type monitored struct {
	words  []string
	script bool  // as part of a script
	at     int64 // in ms
}

var quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// newMonitor returns a monitor of the wanted commands. It ends with the test.
func newMonitor(t testing.TB, addr string, wanted func(c monitored) bool) *monitor {
	t.Helper()
	m := &monitor{addr: addr}
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(t, err)
	in := bufio.NewReader(conn)
	ok, err := in.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "+OK\r\n", ok)
	go func() {
		defer close(done)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			source, _, _ := strings.Cut(line, "]")
			stamp, _, _ := strings.Cut(source, " ")
			seconds, _ := strconv.ParseFloat(stamp, 64)
			c := monitored{script: strings.HasSuffix(source, " lua"), at: int64(seconds * 1000)}
			for _, q := range quoted.FindAllString(line, -1) {
				word, err := strconv.Unquote(q)
				if err != nil {
					word = q
				}
				c.words = append(c.words, word)
			}
			if len(c.words) > 0 && wanted(c) {
				m.mu.Lock()
				m.seen = append(m.seen, c)
				m.mu.Unlock()
			}
		}
	}()
	return m
}

// since returns all commands that the server has run since its last call.
func (m *monitor) since(t testing.TB) (seen []monitored) {
	t.Helper()
	here := "monitored " + strconv.FormatInt(time.Now().UnixNano(), 10)
	harness.Do(t, m.addr, "ECHO", here)
	harness.Eventually(t, answers, "the monitor has caught up", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !slices.ContainsFunc(m.seen, func(c monitored) bool { return c.words[len(c.words)-1] == here }) {
			return false
		}
		seen, m.seen = m.seen, nil
		return true
	})
	return seen
}

// attempts counts the attempts to acquire or release the object of a name.
type attempts struct {
	name     string
	monitors []*monitor
}

// watch counts attempts from now on.
func (p *env) watch(t testing.TB, name string) *attempts {
	t.Helper()
	a := &attempts{name: name}
	for _, addr := range p.addrs() {
		a.monitors = append(a.monitors, newMonitor(t, addr, func(c monitored) bool {
			command := strings.ToUpper(c.words[0])
			return !c.script && slices.Contains(c.words, name) && (command == "EVAL" || command == "EVALSHA" || command == "GET")
		}))
	}
	return a
}

// asleep waits until n waiters of that side, which all started after watch, sleep. Each waiter
// in Java has tried, subscribed, and tried again; of our waiters in one process at least one
// has. Earlier releases are found without a message.
func (a *attempts) asleep(t testing.TB, of side, waiters int) {
	t.Helper()
	java, is := of.(javaSide)
	if !is {
		waiters = 1
	}
	harness.Eventually(t, answers, strconv.Itoa(2*waiters)+" attempts at "+a.name, func() bool {
		n := 0
		for _, m := range a.monitors {
			m.mu.Lock()
			n += len(m.seen)
			m.mu.Unlock()
		}
		return n >= 2*waiters
	})
	// Redisson misses messages between the reply to its second try and its sleep. It has less
	// to do there than this takes.
	for i := 0; is && i < 3; i++ {
		java.c.on(t, "lock", a.name, "remainTimeToLiveAsync").must(t, nil)
	}
}

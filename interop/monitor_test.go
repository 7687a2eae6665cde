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
	script bool // as part of a script
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
			c := monitored{script: strings.HasSuffix(source, " lua")}
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

// catchUp waits until the monitor has all commands that the server has run.
func (m *monitor) catchUp(t testing.TB) {
	t.Helper()
	here := "monitored " + strconv.FormatInt(time.Now().UnixNano(), 10)
	harness.Do(t, m.addr, "ECHO", here)
	harness.Eventually(t, answers, "the monitor has caught up", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return slices.ContainsFunc(m.seen, func(c monitored) bool { return c.words[len(c.words)-1] == here })
	})
}

// since returns the commands since its last call.
func (m *monitor) since(t testing.TB) []monitored {
	t.Helper()
	m.catchUp(t)
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := m.seen
	m.seen = nil
	return seen
}

// attempts counts the attempts to acquire or release the object of a name.
type attempts struct {
	name     string
	monitors []*monitor
}

// watch counts attempts from now on: all of them, or those of owners with that prefix.
func (p *env) watch(t testing.TB, name string, owners ...string) *attempts {
	t.Helper()
	a := &attempts{name: name}
	tries := func(c monitored) bool {
		command := strings.ToUpper(c.words[0])
		if c.script || command != "EVAL" && command != "EVALSHA" && command != "GET" || !slices.Contains(c.words, name) {
			return false
		}
		return owners == nil || slices.ContainsFunc(owners, func(o string) bool {
			return slices.ContainsFunc(c.words, func(w string) bool { return strings.HasPrefix(w, o) })
		})
	}
	for _, addr := range p.addrs() {
		a.monitors = append(a.monitors, newMonitor(t, addr, tries))
	}
	return a
}

func (a *attempts) count() (n int) {
	for _, m := range a.monitors {
		m.mu.Lock()
		n += len(m.seen)
		m.mu.Unlock()
	}
	return n
}

// reach waits until there were n.
func (a *attempts) reach(t testing.TB, n int) {
	t.Helper()
	harness.Eventually(t, answers, strconv.Itoa(n)+" attempts at "+a.name, func() bool { return a.count() >= n })
}

// asleep waits until n waiters of that side, which all started after watch, sleep. Each waiter
// in Java has tried, subscribed, and tried again; of our waiters in one process at least one
// has. Earlier releases are found without a message.
func (a *attempts) asleep(t testing.TB, of side, waiters int) {
	t.Helper()
	java, is := of.(javaSide)
	if !is {
		a.reach(t, 2)
		return
	}
	a.reach(t, 2*waiters)
	// Redisson misses messages between the reply to its second try and its sleep. It has less
	// to do there than this takes.
	for range 3 {
		java.c.on(t, "lock", a.name, "remainTimeToLiveAsync").must(t, nil)
	}
}

// quiet waits until the attempts stop.
func (a *attempts) quiet(t testing.TB) {
	t.Helper()
	last, since := -1, time.Now()
	harness.Eventually(t, answers, "an end of attempts at "+a.name, func() bool {
		if n := a.count(); n != last {
			last, since = n, time.Now()
		}
		return time.Since(since) > 2*shortly
	})
}

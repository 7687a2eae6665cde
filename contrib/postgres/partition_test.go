//go:build linux

package pglock_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
)

// The holds of a client that the network cuts off end before the server gives its locks to others. The server has a network of
// its own, to which each client has a link.
func TestPartition(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	s, err := startAt(n.server(0), "ip", "netns", "exec", n.name)
	require.NoError(t, err)
	t.Cleanup(s.remove)
	for range harness.Size(2, 10) {
		c := advisory.make(t, newPool(t, net.JoinHostPort(n.server(0), strconv.Itoa(s.port))))
		other := advisory.make(t, newPool(t, net.JoinHostPort(n.server(1), strconv.Itoa(s.port))))
		h := acquire(t, c.Lock("partition"))
		waiting := harness.StartLock(t, t.Context(), other.Lock("partition"))
		time.Sleep(rand.N(ttl))

		began := time.Now()
		n.cut(t, 0)
		lost(t, h, ttl)
		require.True(t, waiting.Running(), "two hold the lock")
		require.NoError(t, waiting.EndWithin(ttl+2*time.Second+pause))
		t.Logf("acquired by the other after %v", time.Since(began))
		n.restore(t, 0)
		require.NoError(t, waiting.Value.Unlock(t.Context()))
		require.NoError(t, acquire(t, c.Lock("partition")).Unlock(t.Context()))
		c.Close()
		other.Close()
	}
}

// network is a network namespace with two links to the namespace of the test.
type network struct {
	name string
	id   int
}

// newNetwork returns a network. The end of the test removes it. Without the right to make one the test is skipped.
func newNetwork(t *testing.T) network {
	t.Helper()
	n := network{fmt.Sprintf("rl%d", os.Getpid()), os.Getpid() % 250}
	if out, err := exec.Command("ip", "netns", "add", n.name).CombinedOutput(); err != nil {
		t.Skipf("there is no right to make a network namespace: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", n.name).Run() })
	n.run(t, "ip -n %s link set lo up", n.name)
	for i := range 2 {
		near, far := n.link(i), fmt.Sprintf("s%d", i)
		t.Cleanup(func() { _ = exec.Command("ip", "link", "del", near).Run() })
		n.run(t, "ip link add %s type veth peer name %s netns %s", near, far, n.name)
		n.run(t, "ip addr add %s/30 dev %s", n.client(i), near)
		n.run(t, "ip link set %s up", near)
		n.run(t, "ip -n %s addr add %s/30 dev %s", n.name, n.server(i), far)
		n.run(t, "ip -n %s link set %s up", n.name, far)
	}
	return n
}

func (n network) link(i int) string   { return fmt.Sprintf("%sc%d", n.name, i) }
func (n network) client(i int) string { return fmt.Sprintf("10.213.%d.%d", n.id, 4*i+5) }
func (n network) server(i int) string { return fmt.Sprintf("10.213.%d.%d", n.id, 4*i+6) }

// cut has a link lose all packets: they are sent to nobody's address.
func (n network) cut(t *testing.T, i int) {
	t.Helper()
	n.run(t, "ip neigh replace %s lladdr 02:00:00:00:00:99 dev %s nud permanent", n.server(i), n.link(i))
	n.run(t, "ip -n %s neigh replace %s lladdr 02:00:00:00:00:98 dev s%d nud permanent", n.name, n.client(i), i)
}

func (n network) restore(t *testing.T, i int) {
	t.Helper()
	n.run(t, "ip neigh del %s dev %s", n.server(i), n.link(i))
	n.run(t, "ip -n %s neigh del %s dev s%d", n.name, n.client(i), i)
}

func (n network) run(t *testing.T, format string, args ...any) {
	t.Helper()
	words := strings.Fields(fmt.Sprintf(format, args...))
	out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
	require.NoError(t, err, "%v: %s", words, out)
}

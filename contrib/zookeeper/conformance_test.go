package zklock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/locktest"
)

// client makes the locks of one kind. Its connection goes through a proxy.
type client struct {
	*process
	proxy *testserver.Proxy
	of    func(c *Client, name string) lock.Locker
}

func (c client) Lock(name string) lock.Locker { return c.of(c.Client, name) }

// suite is the suite for one kind of locks. The server ends a session up to a tick after its timeout.
func suite(t *testing.T, folder string, of func(c *Client, name string) lock.Locker) locktest.Suite {
	addr := common.addr(t)
	watcher := admin(t, addr)
	return locktest.Suite{
		NewClient: func(t testing.TB) locktest.Client {
			p := testserver.NewProxy(t, addr)
			return client{process: open(t, []string{p.Addr}), proxy: p, of: of}
		},
		Fenced: true, Fair: true, Leased: true, Extends: true, Closes: true, Expires: true,
		Settle: 250 * time.Millisecond,
		Expiry: timeout + 2*tick,
		CutOff: func(_ testing.TB, c locktest.Client) func() {
			p := c.(client).proxy
			p.Set(testserver.Stall)
			return func() { p.Set(testserver.Pass) }
		},
		Open: func(t testing.TB, name string) {
			in := DefaultPrefix + "/" + folder + "/" + escape(name)
			for _, node := range children(t, watcher, in) {
				require.NoError(t, watcher.Delete(in+"/"+node, -1))
			}
		},
		Left: func(t testing.TB, name string) []string {
			return children(t, watcher, DefaultPrefix+"/"+folder+"/"+escape(name))
		},
	}
}

func TestConformanceOfLocks(t *testing.T) {
	t.Parallel()
	s := suite(t, locks, func(c *Client, name string) lock.Locker { return c.Lock(name) })
	s.Kind = "zookeeper"
	s.Reentrant = true
	s.AtLeast = true
	s.RWLock = func(c locktest.Client, name string) (lock.Locker, lock.Locker) {
		l := c.(client).RWLock(name)
		return l.Read(), l.Write()
	}
	s.Semaphore = func(c locktest.Client, name string, permits int) lock.Locker {
		return c.(client).Semaphore(name, permits)
	}
	left := s.Left
	permits := suite(t, semaphores, nil).Left
	s.Left = func(t testing.TB, name string) []string { return append(left(t, name), permits(t, name)...) }
	locktest.Run(t, s)
}

func TestConformanceOfReaders(t *testing.T) {
	t.Parallel()
	s := suite(t, locks, func(c *Client, name string) lock.Locker { return c.RWLock(name).Read() })
	s.Reentrant = true
	s.Rival = func(c locktest.Client, name string) lock.Locker { return c.(client).RWLock(name).Write() }
	locktest.Run(t, s)
}

func TestConformanceOfPermits(t *testing.T) {
	t.Parallel()
	locktest.Run(t, suite(t, semaphores, func(c *Client, name string) lock.Locker { return c.Semaphore(name, 1) }))
}

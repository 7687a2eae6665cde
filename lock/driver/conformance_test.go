package driver_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/redlatch/redlatch/internal/memstore"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
	"github.com/redlatch/redlatch/lock/locktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type store struct{ *memstore.Store }

func newStore() *store { return &store{memstore.New()} }

// client is a client of a store in memory.
type client struct {
	*driver.Client
	m  *memstore.Driver
	of func(c *driver.Client, name string) lock.Locker
}

func (c client) Lock(name string) lock.Locker { return c.of(c.Client, name) }

// client returns a client, which the end of the test closes.
func (s *store) client(t testing.TB, opts ...driver.Option) client {
	m := s.Driver()
	c := driver.NewClient(m, opts...)
	t.Cleanup(c.Close)
	return client{c, m, func(c *driver.Client, name string) lock.Locker { return c.Lock(name) }}
}

func TestConformance(t *testing.T) {
	for name, of := range map[string]func() *store{
		"near": newStore,
		"far": func() *store {
			s := newStore()
			s.Latency = 20 * time.Millisecond
			s.Leases = true
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			suite := conforms(of)
			suite.Reentrant = true
			suite.AtLeast = true
			suite.RWLock = func(c locktest.Client, name string) (read, write lock.Locker) {
				l := c.(client).RWLock(name)
				return l.Read(), l.Write()
			}
			suite.Semaphore = func(c locktest.Client, name string, permits int) lock.Locker {
				return c.(client).Semaphore(name, permits)
			}
			locktest.Run(t, suite)
		})
	}
}

func TestConformanceOfReaders(t *testing.T) {
	suite := conforms(newStore)
	suite.Reentrant = true
	suite.Rival = func(c locktest.Client, name string) lock.Locker { return c.(client).RWLock(name).Write() }
	locktest.Run(t, of(suite, func(c *driver.Client, name string) lock.Locker { return c.RWLock(name).Read() }))
}

func TestConformanceOfPermits(t *testing.T) {
	suite := conforms(newStore)
	locktest.Run(t, of(suite, func(c *driver.Client, name string) lock.Locker { return c.Semaphore(name, 1) }))
}

// of returns the suite for other locks of the clients.
func of(suite locktest.Suite, of func(c *driver.Client, name string) lock.Locker) locktest.Suite {
	newClient := suite.NewClient
	suite.NewClient = func(t testing.TB) locktest.Client {
		c := newClient(t).(client)
		c.of = of
		return c
	}
	return suite
}

// conforms returns the suite of a store in memory, each test of which has a store of its own, in virtual time.
func conforms(of func() *store) locktest.Suite {
	stores := new(sync.Map)
	s := func(t testing.TB) *store {
		s, _ := stores.Load(t)
		return s.(*store)
	}
	return locktest.Suite{
		NewClient: func(t testing.TB) locktest.Client { return s(t).client(t) },
		Kind:      "memory",
		Fenced:    true, Fair: true, Leased: true, Extends: true, Closes: true, Expires: true,
		Settle: 200 * time.Millisecond,
		Expiry: 4 * time.Second,
		CutOff: func(_ testing.TB, c locktest.Client) func() { return c.(client).m.Cut() },
		Open:   func(t testing.TB, name string) { s(t).Open(name) },
		Left:   func(t testing.TB, name string) []string { return s(t).Left(name) },
		Around: func(t *testing.T, test func(t *testing.T)) {
			synctest.Test(t, func(t *testing.T) {
				stores.Store(testing.TB(t), of())
				test(t)
			})
		},
	}
}

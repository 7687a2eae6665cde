package contract_test

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/memstore"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
	"github.com/redlatch/redlatch/lock/locktest"
	"github.com/redlatch/redlatch/semaphore"
)

// conforming is a client of locktest.
type conforming struct {
	*redlatch.Client
	k    kind
	gate *harness.Gate
}

func (c conforming) Lock(name string) lock.Locker {
	if c.k.free != "" {
		return permits{c.PermitSemaphore(name, semaphore.Permits(1))}
	}
	return c.k.of(c.Client, name)
}

// Every lock keeps the contract that locks of other stores keep.
func TestConformance(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.EachOf(t, choose(leased), func(k kind) string { return k.name }, func(t *testing.T, s *testserver.Server, k kind) {
		suite := locktest.Suite{
			NewClient: func(t testing.TB) locktest.Client {
				c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(timeout), quiet)
				return conforming{c, k, g}
			},
			Kind:   k.kindOf(),
			Fenced: k.tokens, Fair: strings.HasSuffix(k.name, "fair"), Reentrant: !k.once, Leased: true, Extends: true,
			AtLeast: keeps(k), Closes: true, Expires: true,
			Settle: 250 * time.Millisecond,
			Expiry: timeout,
			CutOff: func(_ testing.TB, c locktest.Client) func() {
				g := c.(conforming).gate
				g.Stall()
				return func() { _ = g.Open() }
			},
			Left: func(t testing.TB, name string) []string { return left(t, s, k, name) },
		}
		suite.Open = func(t testing.TB, name string) {
			harness.Do(t, s.Addr, append([]string{"DEL"}, left(t, s, k, name)...)...)
		}
		if k.polls {
			suite.Settle = time.Second
		}
		if k.free != "" { // which stays
			suite.Left, suite.Open = nil, nil
			suite.Skip = map[string]string{"input": "a lease without end is valid"}
		}
		if k.name == "multi" {
			suite.Skip = map[string]string{"max-waiters": "the members have their own waiters"}
		}
		if k.name == "election" {
			suite.Skip = map[string]string{
				"input": "its calls have other names", "cancellation": "its calls have other names", "detach": "the adapter detaches",
			}
		}
		if k.shared {
			suite.Kind = "" // its rival is of another
			suite.Rival = func(c locktest.Client, name string) lock.Locker { return k.rival(c.(conforming).Client, name) }
		}
		if k.name == "write" {
			suite.RWLock = func(c locktest.Client, name string) (read, write lock.Locker) {
				l := c.(conforming).RWLock(name)
				return l.Read(), l.Write()
			}
		}
		locktest.Run(t, suite)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// left returns the keys that are stored for a name, but for those that stay.
func left(t testing.TB, s *testserver.Server, k kind, name string) []string {
	t.Helper()
	keys, err := testserver.Query(s.Addr, "KEYS", "*")
	require.NoError(t, err)
	return slices.DeleteFunc(keys, func(key string) bool {
		return !strings.Contains(key, name) || strings.HasPrefix(key, "redisson_unlock_latch:") ||
			k.stays != "" && strings.HasPrefix(key, strings.Split(k.stays, "%s")[0])
	})
}

// onTwoStores is a client of locktest whose locks have a member on a server and one on another store.
type onTwoStores struct {
	*redlatch.Client
	there *driver.Client
	cut   func() (restore func())
}

func (c onTwoStores) Lock(name string) lock.Locker {
	return c.MultiLock(c.Client.Lock(name), c.there.Lock(name))
}

func (c onTwoStores) Close() {
	c.there.Close()
	c.Client.Close()
}

// So does a multi-lock of members on two stores.
func TestConformanceOnTwoStores(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		store := memstore.New()
		locktest.Run(t, locktest.Suite{
			NewClient: func(t testing.TB) locktest.Client {
				c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(store.TTL), quiet)
				d := store.Driver()
				there := driver.NewClient(d, driver.WithLogger(slog.New(slog.DiscardHandler)))
				t.Cleanup(there.Close)
				return onTwoStores{c, there, func() (restore func()) {
					g.Stall()
					reconnect := d.Cut()
					return func() {
						_ = g.Open()
						reconnect()
					}
				}}
			},
			Kind: "multi", Reentrant: true, Leased: true, Extends: true, AtLeast: true, Closes: true, Expires: true,
			Settle: 250 * time.Millisecond,
			Expiry: store.TTL,
			CutOff: func(_ testing.TB, c locktest.Client) func() { return c.(onTwoStores).cut() },
			Open:   func(_ testing.TB, name string) { store.Open(name) },
			Left: func(t testing.TB, name string) []string {
				keys, err := testserver.Query(s.Addr, "KEYS", "*"+name+"*")
				require.NoError(t, err)
				keys = slices.DeleteFunc(keys, func(key string) bool { return strings.HasPrefix(key, "redisson_unlock_latch:") })
				return append(keys, store.Left(name)...)
			},
			Skip: map[string]string{
				"max-waiters": "the members have their own waiters", "reentry": "UnlockOwner does not know the members",
			},
		})
	})
}

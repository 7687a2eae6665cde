package system_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// leftovers are uses of one object of each kind, as docs/operations/sizing.md calls them. Kinds of one row leave
// the same.
var leftovers = []struct {
	kinds string
	uses  uses
}{
	{"lock, spin lock, plain lock, fair lock, read-write lock, MultiLock, Redlock", uses{
		func(ctx context.Context, c, other *redlatch.Client) error {
			return locked(ctx, c.Lock("orders"), other.SpinLock("orders"), c.MultiLock(c.Lock("orders"), c.Lock("more")),
				redlatch.RedLock("orders", []*redlatch.Client{c}))
		},
		func(ctx context.Context, c, other *redlatch.Client) error {
			return locked(ctx, c.PlainLock("orders"), other.PlainLock("orders"))
		},
		func(ctx context.Context, c, other *redlatch.Client) error {
			return locked(ctx, c.FairLock("orders"), other.FairLock("orders"))
		},
		func(ctx context.Context, c, other *redlatch.Client) error {
			l, o := c.RWLock("orders"), other.RWLock("orders")
			return locked(ctx, l.Read(), o.Write(), l.Write(), o.Read())
		},
	}},
	{"fenced lock", uses{func(ctx context.Context, c, other *redlatch.Client) error {
		return locked(ctx, c.FencedLock("orders"), other.FencedLock("orders"))
	}}},
	{"semaphore, permit semaphore", usesOfPermits(semaphore.Permits(2))},
	{"the same with `semaphore.IdleTTL(time.Hour)`", usesOfPermits(semaphore.Permits(2), semaphore.IdleTTL(time.Hour))},
	{"latch whose count is 0", uses{func(ctx context.Context, c, other *redlatch.Client) error {
		l := c.CountDownLatch("orders")
		if _, err := l.TrySetCount(ctx, 1); err != nil {
			return err
		}
		if _, err := l.CountDown(ctx); err != nil {
			return err
		}
		return other.CountDownLatch("orders").Wait(ctx)
	}}},
	{"latch that nobody counts down", uses{func(ctx context.Context, c, _ *redlatch.Client) error {
		_, err := c.CountDownLatch("orders").TrySetCount(ctx, 1)
		return err
	}}},
	{"election", uses{func(ctx context.Context, c, other *redlatch.Client) error {
		for _, c := range []*redlatch.Client{c, other} {
			term, err := c.Election("orders").Campaign(ctx, "here")
			if err != nil {
				return err
			}
			if err := term.Resign(ctx); err != nil {
				return err
			}
		}
		return nil
	}}},
	{"once-only work", uses{func(ctx context.Context, c, _ *redlatch.Client) error {
		_, err := c.Once("orders").Run(ctx, "9:00", nothing)
		return err
	}}},
}

// use is a use of an object by one client or two.
type use func(ctx context.Context, c, other *redlatch.Client) error

type uses []use

// usesOfPermits returns the uses of semaphores of both kinds.
func usesOfPermits(opts ...semaphore.Option) uses {
	return uses{
		func(ctx context.Context, c, _ *redlatch.Client) error {
			return c.Semaphore("orders", opts...).Do(ctx, nothing)
		},
		func(ctx context.Context, c, _ *redlatch.Client) error {
			return c.PermitSemaphore("orders", opts...).Do(ctx, nothing)
		},
	}
}

// locked acquires and releases locks, one after the other.
func locked(ctx context.Context, all ...lock.Locker) error {
	for _, l := range all {
		if err := l.Do(ctx, nothing); err != nil {
			return err
		}
	}
	return nil
}

// TestSizingListsWhatStays compares the table of docs/operations/sizing.md with the keys that remain
// after each kind of object was used, and with their lifetimes, to ten seconds.
func TestSizingListsWhatStays(t *testing.T) {
	doc, err := os.ReadFile("../../docs/operations/sizing.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(doc), "\n| after | key | lifetime |\n|---|---|---|\n")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n\n")
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var rows []string
		for _, row := range leftovers {
			var of []string
			for i, use := range row.uses {
				left := leftBy(t, s, row.kinds, use)
				if i > 0 {
					require.Equal(t, of, left, "%s, use %d", row.kinds, i)
				}
				of = left
			}
			rows = append(rows, of...)
		}
		require.Equal(t, table, strings.Join(rows, "\n"))
	})
}

var requestID = regexp.MustCompile("[0-9a-f]{32}")

// leftBy returns the rows of the table after a use of objects.
func leftBy(t *testing.T, s *testserver.Server, kinds string, use use) (rows []string) {
	t.Helper()
	harness.Do(t, s.Addr, "FLUSHALL")
	c, other := harness.Client(t, s), harness.Client(t, s)
	require.NoError(t, use(t.Context(), c, other), kinds)
	harness.Idle(t, c, other)
	keys, err := testserver.Query(s.Addr, "KEYS", "*")
	require.NoError(t, err)
	names := strings.NewReplacer(c.ID(), "<client>", other.ID(), "<client>", "orders", "<name>")
	for _, key := range keys {
		shown := requestID.ReplaceAllString(names.Replace(key), "<id>")
		rows = append(rows, fmt.Sprintf("| %s | `%s` | %s |", kinds, shown, lifetime(harness.PTTL(t, s.Addr, key))))
	}
	if len(keys) == 0 {
		return []string{fmt.Sprintf("| %s | none | |", kinds)}
	}
	slices.Sort(rows)
	return slices.Compact(rows)
}

// lifetime describes one of so many ms.
func lifetime(ms int64) string {
	d := (time.Duration(ms)*time.Millisecond + 10*time.Second - 1).Truncate(10 * time.Second)
	switch {
	case ms < 0:
		return "no end"
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d%time.Hour == 0:
		return fmt.Sprintf("%.0f h", d.Hours())
	}
	return fmt.Sprintf("%.0f min", d.Minutes())
}

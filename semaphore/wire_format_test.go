package semaphore_test

import (
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// operation is an operation with the number of free permits afterwards and its messages.
type operation struct {
	what     string
	do       func() error
	free     string // "nil" without a semaphore
	messages string // all payloads
}

func (x *wireTest) runAll(name, channel string, operations []operation) {
	x.t.Helper()
	for _, f := range operations {
		require.NoError(x.t, f.do(), f.what)
		require.Equal(x.t, f.free, x.reply("GET", name), f.what)
		require.Equal(x.t, f.messages, x.reply("LRANGE", channel, "0", "-1"), f.what)
		harness.Do(x.t, x.addr, "DEL", channel)
	}
}

func eachName(t *testing.T, test func(x *wireTest, name, channel, timeouts string)) {
	for _, n := range [][3]string{
		{"orders", "redisson_sc:{orders}", "{orders}:timeout"},
		{"{app}:orders", "redisson_sc:{app}:orders", "{app}:orders:timeout"},
	} {
		t.Run(n[0], func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) { test(newWireTest(t, s), n[0], n[1], n[2]) })
		})
	}
}

func TestSemaphoreWireFormat(t *testing.T) {
	eachName(t, func(x *wireTest, name, channel, _ string) {
		ctx, s := x.ctx, semaphore.New(x.all, name)
		x.runAll(name, channel, []operation{
			{"release if exists, without a semaphore", func() error { return only(s.ReleaseIfExists(ctx, 3)) }, "nil", ""},
			{"drain without a semaphore", func() error { return only(s.Drain(ctx)) }, "nil", ""},
			{"set", func() error { return only(s.TrySetPermits(ctx, 10)) }, "10", "10"},
			{"set again", func() error { return only(s.TrySetPermits(ctx, 20)) }, "10", ""},
			{"acquire", func() error { return s.Acquire(ctx, 4) }, "6", ""},
			{"release", func() error { return s.Release(ctx, 1) }, "7", "7"},
			{"release some", func() error { return s.Release(ctx, 2) }, "9", "9"},
			{"release if exists", func() error { return only(s.ReleaseIfExists(ctx, 1)) }, "10", "10"},
			{"add", func() error { return s.AddPermits(ctx, 5) }, "15", "15"},
			{"remove", func() error { return s.AddPermits(ctx, -5) }, "10", "10"},
			{"remove more than there are", func() error { return s.AddPermits(ctx, -15) }, "-5", ""},
			{"release, still negative", func() error { return s.Release(ctx, 2) }, "-3", ""},
			{"release, now 0", func() error { return s.Release(ctx, 3) }, "0", ""},
			{"remove from 0", func() error { return s.AddPermits(ctx, -3) }, "-3", ""},
			{"drain a negative number", func() error { return only(s.Drain(ctx)) }, "0", ""},
			{"drain 0", func() error { return only(s.Drain(ctx)) }, "0", ""},
			{"release to 0", func() error { return s.Release(ctx, 7) }, "7", "7"},
			{"drain", func() error { return only(s.Drain(ctx)) }, "0", ""},
			{"fill up", func() error { return s.Release(ctx, semaphore.MaxPermits) }, "2147483647", "2147483647"},
			{"acquire all", func() error { return s.Acquire(ctx, semaphore.MaxPermits) }, "0", ""},
		})
		require.Equal(x.t, map[string]string{name: "string"}, x.keys())
		require.EqualValues(x.t, -1, x.number("PTTL", name))
		harness.Do(x.t, x.addr, "DEL", name)
		x.runAll(name, channel, []operation{
			{"release without a semaphore", func() error { return s.Release(ctx, 2) }, "2", "2"},
			{"delete", func() error { harness.Do(x.t, x.addr, "DEL", name); return nil }, "nil", ""},
			{"add without a semaphore", func() error { return s.AddPermits(ctx, -2) }, "-2", ""},
		})
	})
}

// acquired returns the scores of the acquired permits by their ids.
func (x *wireTest) acquired(timeouts string) map[string]string {
	x.t.Helper()
	all, err := x.conn.Do(x.ctx, x.conn.B().Zrange().Key(timeouts).Min("0").Max("-1").Withscores().Build()).AsZScores()
	require.NoError(x.t, err)
	scores := map[string]string{}
	for _, z := range all {
		require.Len(x.t, z.Member, 16)
		scores[hex.EncodeToString([]byte(z.Member))] = x.reply("ZSCORE", timeouts, z.Member)
	}
	return scores
}

func TestPermitSemaphoreWireFormat(t *testing.T) {
	eachName(t, func(x *wireTest, name, channel, timeouts string) {
		ctx, e := x.ctx, semaphore.NewPermitSemaphore(x.all, name)
		var ids []string
		take := func(n int, opts ...lock.Option) func() error {
			return func() error {
				p, err := e.AcquireN(ctx, n, opts...)
				if err == nil {
					ids = append(ids, p.IDs()...)
					keep(x.t, p)
				}
				return err
			}
		}
		give := func(n int) func() error {
			return func() error {
				err := e.Release(ctx, ids[:n]...)
				ids = ids[n:]
				return err
			}
		}
		x.runAll(name, channel, []operation{
			{"set", func() error { return only(e.TrySetPermits(ctx, 10)) }, "10", "10"},
			{"set again", func() error { return only(e.TrySetPermits(ctx, 11)) }, "10", ""},
			{"acquire", take(1, lock.Lease(time.Minute)), "9", ""},
			{"acquire several", take(3, lock.Lease(time.Minute)), "6", ""},
			{"release", give(1), "7", "7"},
			{"release a list", give(2), "9", "2"},
			{"release the last one", give(1), "10", "10"},
			{"add", func() error { return e.AddPermits(ctx, 5) }, "15", "5"},
			{"remove", func() error { return e.AddPermits(ctx, -5) }, "10", ""},
			{"acquire to change the total", take(4, lock.Lease(time.Minute)), "6", ""},
			{"set the total", func() error { return e.SetPermits(ctx, 20) }, "16", "20"},
			{"set the same total", func() error { return e.SetPermits(ctx, 20) }, "16", ""},
			{"set a smaller total", func() error { return e.SetPermits(ctx, 5) }, "1", "5"},
			{"set a total below the acquired permits", func() error { return e.SetPermits(ctx, 2) }, "-2", ""},
			{"add to a negative number", func() error { return e.AddPermits(ctx, 2) }, "0", ""},
			{"remove from 0", func() error { return e.AddPermits(ctx, -3) }, "-3", ""},
			{"release, still negative", give(3), "0", ""},
			{"release the last acquired", give(1), "1", "1"},
		})
		require.Equal(x.t, map[string]string{name: "string"}, x.keys())

		// The clock of the server determines leases.
		before := x.now()
		a, err := e.Acquire(ctx, lock.Lease(20*time.Second))
		require.NoError(x.t, err)
		after := x.now()
		require.Equal(x.t, map[string]string{name: "string", timeouts: "zset"}, x.keys())
		require.EqualValues(x.t, -1, x.number("PTTL", timeouts))
		taken := x.acquired(timeouts)
		at, err := strconv.ParseInt(taken[a.ID()], 10, 64)
		require.NoError(x.t, err, taken)
		require.True(x.t, before+20_001 <= at && at <= after+20_001, "%d is not 20 s and 1 ms after %d to %d", at, before, after)
		require.NoError(x.t, e.AddPermits(ctx, 2))
		b, err := e.Acquire(ctx, semaphore.Forever())
		require.NoError(x.t, err)
		c, err := e.Acquire(ctx)
		require.NoError(x.t, err)
		taken = x.acquired(timeouts)
		require.ElementsMatch(x.t, []string{a.ID(), b.ID(), c.ID()}, slices.Collect(maps.Keys(taken)))
		require.Equal(x.t, "922337203685477", taken[b.ID()])
		left, err := e.LeaseTime(ctx, c.ID())
		require.NoError(x.t, err)
		require.True(x.t, left > 20*time.Second && left <= 30*time.Second, "%v", left)

		// Redisson reads the score in this way.
		id, err := hex.DecodeString(a.ID())
		require.NoError(x.t, err)
		require.Equal(x.t, taken[a.ID()], x.reply("ZSCORE", timeouts, string(id)))
		for _, p := range []*semaphore.Permit{a, b, c} {
			require.NoError(x.t, p.Release(ctx))
		}
		harness.Do(x.t, x.addr, "DEL", channel)
		require.Equal(x.t, map[string]string{name: "string"}, x.keys())
	})
}

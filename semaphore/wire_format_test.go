package semaphore_test

import (
	"fmt"
	"strconv"
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

// operation is an operation with the number of free permits afterwards and its messages.
type operation struct {
	what     string
	do       func() error
	free     string // "" without a semaphore
	messages string // all payloads
}

// wireTest is a semaphore, with its keys and its channel.
type wireTest struct {
	*testing.T
	c                       *redlatch.Client
	addr                    string
	name, channel, timeouts string
	messages                <-chan string
}

func eachName(t *testing.T, test func(x *wireTest)) {
	names := []wireTest{
		{name: "orders", channel: "redisson_sc:{orders}", timeouts: "{orders}:timeout"},
		{name: "{app}:orders", channel: "redisson_sc:{app}:orders", timeouts: "{app}:orders:timeout"},
	}
	harness.EachOf(t, names, func(n wireTest) string { return n.name }, func(t *testing.T, s *testserver.Server, x wireTest) {
		x.T, x.c, x.addr, x.messages = t, harness.Client(t, s), s.Addr, harness.Messages(t, s.Addr, x.channel)
		test(&x)
	})
}

// reply returns the reply to a command as text.
func (x *wireTest) reply(words ...string) string {
	x.Helper()
	reply, err := testserver.Query(x.addr, words...)
	require.NoError(x, err)
	return strings.Join(reply, " ")
}

func (x *wireTest) runAll(operations []operation) {
	x.Helper()
	const end = "end"
	for _, f := range operations {
		require.NoError(x, f.do(), f.what)
		require.Equal(x, f.free, x.reply("GET", x.name), f.what)
		harness.Do(x, x.addr, "PUBLISH", x.channel, end)
		var all []string
		for m := ""; m != end; all = append(all, m) {
			m = harness.Receive(x, soon, f.what, x.messages)
		}
		require.Equal(x, f.messages, strings.Join(all[:len(all)-1], " "), f.what)
	}
}

// requireKeys checks the keys of the server except cached replies. None of these expires.
func (x *wireTest) requireKeys(want map[string]string) {
	x.Helper()
	types := map[string]string{}
	for key := range strings.FieldsSeq(x.reply("KEYS", "*")) {
		if !strings.HasPrefix(key, "redlatch_sc_request") {
			types[key] = strings.TrimPrefix(harness.Do(x, x.addr, "TYPE", key), "+")
			require.EqualValues(x, -1, harness.PTTL(x, x.addr, key), key)
		}
	}
	require.Equal(x, want, types)
}

func TestSemaphoreWireFormat(t *testing.T) {
	eachName(t, func(x *wireTest) {
		ctx, s := x.Context(), x.c.Semaphore(x.name)
		drains := func(want int) func() error {
			return func() error {
				n, err := s.Drain(ctx)
				require.Equal(x, want, n)
				return err
			}
		}
		x.runAll([]operation{
			{"release if exists, without a semaphore", func() error { return only(s.ReleaseIfExists(ctx, 3)) }, "", ""},
			{"drain without a semaphore", drains(0), "", ""},
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
			{"drain a negative number", drains(-3), "0", ""},
			{"drain 0", drains(0), "0", ""},
			{"release to 0", func() error { return s.Release(ctx, 7) }, "7", "7"},
			{"drain", drains(7), "0", ""},
			{"set the free ones", func() error { return s.SetPermits(ctx, 2) }, "2", "2"},
			{"set the same number", func() error { return s.SetPermits(ctx, 2) }, "2", ""},
			{"set to 0", func() error { return s.SetPermits(ctx, 0) }, "0", ""},
			{"fill up", func() error { return s.Release(ctx, semaphore.MaxPermits) }, "2147483647", "2147483647"},
			{"acquire all", func() error { return s.Acquire(ctx, semaphore.MaxPermits) }, "0", ""},
		})
		x.requireKeys(map[string]string{x.name: "string"})
		harness.Do(x, x.addr, "DEL", x.name)
		x.runAll([]operation{
			{"release without a semaphore", func() error { return s.Release(ctx, 2) }, "2", "2"},
			{"delete", func() error { return only(s.Delete(ctx)) }, "", ""},
			{"add without a semaphore", func() error { return s.AddPermits(ctx, -2) }, "-2", ""},
			{"delete again", func() error { return only(s.Delete(ctx)) }, "", ""},
			{"set for a minute", func() error { return only(s.TrySetPermitsFor(ctx, 2, time.Minute)) }, "2", "2"},
		})
		require.InDelta(x, 59_000, harness.PTTL(x, x.addr, x.name), 1000)
	})
}

func TestPermitSemaphoreWireFormat(t *testing.T) {
	eachName(t, func(x *wireTest) {
		ctx, e := x.Context(), x.c.PermitSemaphore(x.name)
		var ids []string
		acquire := func(n int) func() error {
			return func() error {
				ids = append(ids, take(x, e, n, lock.Lease(time.Minute)).IDs()...)
				return nil
			}
		}
		give := func(n int) func() error {
			return func() error {
				err := e.Release(ctx, ids[:n]...)
				ids = ids[n:]
				return err
			}
		}
		x.runAll([]operation{
			{"set", func() error { return only(e.TrySetPermits(ctx, 10)) }, "10", "10"},
			{"set again", func() error { return only(e.TrySetPermits(ctx, 11)) }, "10", ""},
			{"acquire", acquire(1), "9", ""},
			{"acquire several", acquire(3), "6", ""},
			{"release", give(1), "7", "7"},
			{"release a list", give(2), "9", "2"},
			{"release the last one", give(1), "10", "10"},
			{"add", func() error { return e.AddPermits(ctx, 5) }, "15", "5"},
			{"remove", func() error { return e.AddPermits(ctx, -5) }, "10", ""},
			{"acquire to change the total", acquire(4), "6", ""},
			{"set the total", func() error { return e.SetPermits(ctx, 20) }, "16", "20"},
			{"set the same total", func() error { return e.SetPermits(ctx, 20) }, "16", ""},
			{"set a smaller total", func() error { return e.SetPermits(ctx, 5) }, "1", "5"},
			{"set a total below the acquired permits", func() error { return e.SetPermits(ctx, 2) }, "-2", ""},
			{"add to a negative number", func() error { return e.AddPermits(ctx, 2) }, "0", ""},
			{"remove from 0", func() error { return e.AddPermits(ctx, -3) }, "-3", ""},
			{"release, still negative", give(3), "0", ""},
			{"release the last acquired", give(1), "1", "1"},
			{"add for what follows", func() error { return e.AddPermits(ctx, 1) }, "2", "1"},
		})
		x.requireKeys(map[string]string{x.name: "string"})

		// The clock of the server determines leases. A permit is 16 bytes.
		now := func() int64 {
			var s, us int64
			_, err := fmt.Sscan(x.reply("TIME"), &s, &us)
			require.NoError(x, err)
			return 1000*s + us/1000
		}
		before := now()
		a := take(x, e, 1, lock.Lease(20*time.Second))
		after := now()
		at, err := strconv.ParseInt(x.reply("ZSCORE", x.timeouts, raw(x, a.ID())), 10, 64)
		require.NoError(x, err)
		require.True(x, before+20_001 <= at && at <= after+20_001, "%d is not 20 s and 1 ms after %d to %d", at, before, after)
		b := take(x, e, 1, semaphore.Forever())
		require.Equal(x, "922337203685477", x.reply("ZSCORE", x.timeouts, raw(x, b.ID())))
		require.Equal(x, "2", x.reply("ZCARD", x.timeouts))
		x.requireKeys(map[string]string{x.name: "string", x.timeouts: "zset"})

		require.NoError(x, a.Release(ctx))
		require.NoError(x, b.Release(ctx))
		x.requireKeys(map[string]string{x.name: "string"})
	})
}

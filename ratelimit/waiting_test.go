package ratelimit_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

// start calls Acquire in the background.
func start(t testing.TB, ctx context.Context, l *ratelimit.Limiter, n int, opts ...lock.WaitOption) *harness.Call[struct{}] {
	t.Helper()
	return harness.Start(t, ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, l.Acquire(ctx, n, opts...) })
}

// history is the entries that were added and not removed again by an undo: their times and permits.
type history map[string][2]int64

// add is a callback of monitor. An entry that is added again counts from then on.
func (h history) add(entry string, at, permits int64) {
	h[entry] = [2]int64{at, permits}
	if permits == 0 {
		delete(h, entry)
	}
}

func (h history) pace() pace {
	p := pace{}
	for _, e := range h {
		p[e[0]] += e[1]
	}
	return p
}

// pace is a sequence of acquisitions: their permits, by the time in ms.
type pace map[int64]int64

// requireLimit fails the test unless no window has more permits than the rate, and returns which part of the rate was
// used.
func (p pace) requireLimit(t testing.TB, rate int64, per time.Duration) (used float64) {
	t.Helper()
	times := slices.Sorted(maps.Keys(p))
	ms := per.Milliseconds()
	windows := (times[len(times)-1] - times[0]) / ms // that are over
	total, inWindow, oldest := int64(0), int64(0), 0
	for _, at := range times {
		if at < times[0]+windows*ms {
			total += p[at]
		}
		for inWindow += p[at]; times[oldest] <= at-ms; oldest++ {
			inWindow -= p[times[oldest]]
		}
		require.LessOrEqual(t, inWindow, rate)
	}

	t.Logf("%d permits in %d windows", total, windows)
	return float64(total) / float64(rate*windows)
}

// load has clients acquire permits for a while, in requests of 1 to most of them.
func load(ctx context.Context, clients []*redlatch.Client, most int) (wait func() (acquired int64)) {
	var all sync.WaitGroup
	var acquired atomic.Int64
	for _, c := range clients {
		l := c.RateLimiter(key)
		for i := range 20 {
			all.Go(func() {
				for n := 1 + i%most; ctx.Err() == nil; {
					if l.Acquire(ctx, n) == nil {
						acquired.Add(int64(n))
					}
				}
			})
		}
	}
	return func() int64 {
		all.Wait()
		return acquired.Load()
	}
}

// Under load almost all of the rate is used, whatever the number of clients, and the size of requests.
func TestUse(t *testing.T) {
	for _, row := range []struct {
		clients, most int
		rate          int64
		per           time.Duration
	}{
		{1, 1, 100, time.Second}, {3, 3, 100, time.Second}, {3, 1, 1000, time.Second},
		{1, 1, 50, 100 * time.Millisecond}, {3, 3, 50, 100 * time.Millisecond}, {2, 1, 1, 100 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%+v", row), func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				s.Latency = 50 * time.Microsecond
				clients := make([]*redlatch.Client, row.clients)
				for i := range clients {
					clients[i] = s.Client(t)
				}
				setRate(t, clients[0].RateLimiter(key), int(row.rate), row.per)
				const windows = 10
				ctx, cancel := context.WithTimeout(t.Context(), windows*row.per)
				defer cancel()
				wait := load(ctx, clients, row.most)

				// Each entry is on the server for an interval at least.
				conn := s.Conn(t)
				seen := map[string]int64{}
				p := pace{}
				for ctx.Err() == nil {
					time.Sleep(row.per / 4)
					scores, err := conn.Do(context.Background(),
						conn.B().Zrange().Key(wire.RatePermits(key)).Min("0").Max("-1").Withscores().Build()).AsZScores()
					require.NoError(t, err)
					for _, e := range scores {
						if seen[e.Member] == 0 {
							seen[e.Member] = int64(binary.LittleEndian.Uint32([]byte(e.Member[17:])))
							p[int64(e.Score)] += seen[e.Member]
						}
					}
				}
				acquired := wait()
				used := p.requireLimit(t, row.rate, row.per)
				total := int64(0)
				for _, n := range p {
					total += n
				}
				require.InDelta(t, total, acquired, float64(20*row.clients*row.most))
				// Times are whole milliseconds, so an interval may last one longer.
				require.GreaterOrEqual(t, used, 0.99-float64(time.Millisecond)/float64(row.per))
			})
		})
	}
}

// No window has more permits than the rate, on a real server.
func TestLimit(t *testing.T) {
	const rate, per = 200, 500 * time.Millisecond
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		clients := []*redlatch.Client{harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)}
		setRate(t, clients[0].RateLimiter(key), rate, per)
		h := history{}
		stop := monitor(t, s, h.add)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(harness.Size(6, 60))*per)
		defer cancel()
		acquired := load(ctx, clients, 3)()
		harness.Idle(t, clients...)
		stop()
		t.Logf("%d permits for callers; %.2f%% of the rate", acquired, 100*h.pace().requireLimit(t, rate, per))
		requireSound(t, s, rate)
	})
}

// monitor calls f for each entry that is added, and with 0 permits for each that is removed by an undo, until stop is
// called.
func monitor(t testing.TB, s *testserver.Server, f func(entry string, at, permits int64)) (stop func()) {
	t.Helper()
	conn, err := net.Dial("tcp", s.Addr)
	require.NoError(t, err)
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(t, err)
	lines := bufio.NewReader(conn)
	_, err = lines.ReadString('\n')
	require.NoError(t, err)

	harness.Do(t, s.Addr, "ECHO", `"`)
	for line := ""; !strings.Contains(strings.ToUpper(line), `"ECHO"`); {
		line, err = lines.ReadString('\n')
		require.NoError(t, err)
		if strings.HasSuffix(line, "\"\"\"\r\n") {
			require.NoError(t, conn.Close())
			t.Skip("MONITOR of this server, such as Valkey 8.1.1, does not escape quotes")
		}
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		quoted := regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
		for {
			line, err := lines.ReadString('\n')
			words := quoted.FindAllString(line, -1)
			if err != nil || len(words) > 1 && strings.Contains(words[1], "end of test") {
				return
			}
			if len(words) == 3 && strings.EqualFold(words[0], `"ZREM"`) {
				entry, _ := strconv.Unquote(words[2])
				f(entry, 0, 0)
			}
			if len(words) < 4 || !strings.EqualFold(words[0], `"ZADD"`) {
				continue
			}
			for i := 2; i+1 < len(words); i += 2 {
				score, _ := strconv.Unquote(words[i])
				entry, _ := strconv.Unquote(words[i+1])
				at, err := strconv.ParseInt(score, 10, 64)
				if err != nil || len(entry) != 21 {
					t.Errorf("an entry that is none: %s", line)
					continue
				}
				f(entry, at, int64(binary.LittleEndian.Uint32([]byte(entry[17:]))))
			}
		}
	}()
	return func() {
		harness.Do(t, s.Addr, "ECHO", "end of test")
		<-done
		conn.Close()
	}
}

// Waiters of a process are served in order, whatever they ask for.
func TestOrder(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(3, long))
		require.NoError(t, l.TryAcquire(t.Context(), 3))
		var mu sync.Mutex
		var order []int
		var all sync.WaitGroup
		for i, n := range []int{3, 1, 2, 3, 1} {
			all.Go(func() {
				if err := l.Acquire(t.Context(), n); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			harness.Waits(t, i+1, c)
		}
		setRate(t, l, 3, 500*time.Millisecond)
		all.Wait()
		require.Equal(t, 0, order[0])
		require.ElementsMatch(t, []int{1, 2}, order[1:3]) // served at once
		require.Equal(t, []int{3, 4}, order[3:])
	})
}

// The waiters of a process share their requests.
func TestRequestsOfManyWaiters(t *testing.T) {
	harness.EachAlone(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(50, time.Second))
		require.NoError(t, l.TryAcquire(t.Context(), 50))
		first := start(t, t.Context(), l, 1)
		harness.Waits(t, 1, c)
		conn := harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		var all sync.WaitGroup
		for range 99 {
			all.Go(func() {
				if err := l.Acquire(t.Context(), 1); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		require.NoError(t, first.End())
		require.LessOrEqual(t, harness.Commands(t, conn)["evalsha"], 6)
	})
}

// A request for many permits does not starve beside small ones of another process.
func TestLargeRequest(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const per, waiting = 300 * time.Millisecond, 15
		s.Latency = 50 * time.Microsecond
		small, large := s.Client(t).RateLimiter(key), s.Client(t).RateLimiter(key)
		setRate(t, large, 10, per)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range waiting {
			all.Go(func() {
				for ctx.Err() == nil {
					_ = small.Acquire(ctx, 1)
				}
			})
		}
		defer all.Wait()
		defer cancel()
		time.Sleep(per)
		for range 20 {
			began := time.Now()
			require.NoError(t, large.Acquire(t.Context(), 10))

			// Two intervals for older requests, one for its own permits, and one for what the other process still takes.
			require.LessOrEqual(t, time.Since(began), 4*per+20*time.Millisecond)
		}
	})
}

// TryAcquire does not overtake a waiter of another process, but it does not wait for it either.
func TestTryBesideWaiter(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l, other := c.RateLimiter(key, ratelimit.Rate(5, long)), harness.Client(t, s).RateLimiter(key)
		require.NoError(t, l.TryAcquire(t.Context(), 3))
		ctx, cancel := context.WithCancel(t.Context())
		waits := start(t, ctx, l, 5)
		harness.Waits(t, 1, c)
		harness.NotAcquired(t, other.TryAcquire(t.Context(), 1))
		harness.NotAcquired(t, l.TryAcquire(t.Context(), 1))
		require.LessOrEqual(t, harness.PTTL(t, s.Addr, wire.RateTurn(key)), int64(5500))
		cancel()
		harness.NotAcquired(t, waits.End())
		harness.Idle(t, c)
		require.NoError(t, other.TryAcquire(t.Context(), 1))
		requireFree(t, l, 1)
	})
}

// A waiter that gives up leaves nothing, and wakes those behind it, here and elsewhere.
func TestGiveUp(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, d := harness.Client(t, s), harness.Client(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(5, long))
		require.NoError(t, l.TryAcquire(t.Context(), 3))
		first := start(t, t.Context(), l, 5)
		harness.Waits(t, 1, c)
		second := start(t, t.Context(), l, 1)
		harness.Waits(t, 2, c)
		elsewhere := start(t, t.Context(), d.RateLimiter(key), 1)
		harness.Waits(t, 1, d)
		require.Eventually(t, func() bool { return d.Stats().PubSub.Subscribed == 1 }, 5*time.Second, time.Millisecond)
		first.Leave()
		require.NoError(t, second.EndWithin(3*time.Second))
		require.NoError(t, elsewhere.EndWithin(7*time.Second))
		requireFree(t, l, 0)

		for _, opts := range [][]lock.WaitOption{{lock.Wait(20 * time.Millisecond)}, {lock.Wait(0)}} {
			harness.NotAcquired(t, l.Acquire(t.Context(), 1, opts...))
		}
		harness.Idle(t, c, d)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", wire.RateTurn(key)))
		requireSound(t, s, 5)
	})
}

func TestMaxWaiters(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(1, long))
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		waits := start(t, t.Context(), l, 1)
		harness.Waits(t, 1, c)
		require.ErrorIs(t, l.Acquire(t.Context(), 1, lock.MaxWaiters(1)), lock.ErrNotAcquired)
		waits.Leave()
	})
}

// The turn of a process that has died delays others only for a moment.
func TestDeadClientWithTurn(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key, ratelimit.Rate(5, long))
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		harness.Do(t, s.Addr, "SET", wire.RateTurn(key), "1 00000000-0000-0000-0000-000000000000", "PX", "2000")
		began := time.Now()
		harness.NotAcquired(t, l.TryAcquire(t.Context(), 1))
		require.NoError(t, l.Acquire(t.Context(), 1))
		require.Less(t, time.Since(began), 4500*time.Millisecond)

		// A turn without an end is nobody's.
		harness.Do(t, s.Addr, "SET", wire.RateTurn(key), "1 somebody")
		require.NoError(t, l.TryAcquire(t.Context(), 1))
	})
}

// Whatever happens to a request or its reply, its permits are taken once, or not at all if the call fails.
func TestFaults(t *testing.T) {
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		sha := harness.SHA(t, "limiter.lua", "acquire.lua")
		for _, fault := range harness.Faults {
			for what, acquire := range map[string]func(l *ratelimit.Limiter) error{
				"Acquire":    func(l *ratelimit.Limiter) error { return l.Acquire(t.Context(), 2) },
				"TryAcquire": func(l *ratelimit.Limiter) error { return l.TryAcquire(t.Context(), 2) },
				"FailFast":   func(l *ratelimit.Limiter) error { return l.Acquire(t.Context(), 2, lock.FailFast()) },
			} {
				t.Run(what+" "+fault.String(), func(t *testing.T) {
					harness.Do(t, s.Addr, "FLUSHALL")
					c, g := harness.GatedClient(t, s)
					l := c.RateLimiter(key, ratelimit.Rate(3, long)) // of which the request takes the rest
					require.NoError(t, l.TryAcquire(t.Context(), 1)) // the server knows the script
					var err error
					g.During(t, fault, sha, func() { err = acquire(l) })
					require.NoError(t, g.Open())
					harness.Idle(t, c)

					used := 1
					if err == nil {
						used += 2
					} else {
						require.ErrorIs(t, err, lock.ErrIndeterminate)
						require.NotEqual(t, "Acquire", what)
					}
					free, freeErr := harness.Client(t, s).RateLimiter(key).Available(t.Context())
					require.NoError(t, freeErr)
					if fault == harness.DelayRequest && err != nil && free == 3-used-2 {
						used += 2 // it has come after the undo: see Retries
					}
					require.Equal(t, 3-used, free)
					requireSound(t, s, 3)
				})
			}
		}
	})
}

// Configuration and release take effect once.
func TestFaultsOfOtherRequests(t *testing.T) {
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		config := ratelimit.Config{Rate: 10, Per: long}
		for what, row := range map[string]struct {
			files []string
			call  func(l *ratelimit.Limiter) (any, error)
			want  any
			free  int
		}{
			"TrySetRate": {[]string{"try_set_rate.lua"}, func(l *ratelimit.Limiter) (any, error) { return l.TrySetRate(t.Context(), config) }, true, 10},
			"SetRate":    {[]string{"limiter.lua", "set_rate.lua"}, func(l *ratelimit.Limiter) (any, error) { return 0, l.SetRate(t.Context(), config) }, 0, 6},
			"Release":    {[]string{"limiter.lua", "release.lua"}, func(l *ratelimit.Limiter) (any, error) { return l.Release(t.Context(), 2) }, 2, 8},
			"Delete":     {[]string{"delete.lua"}, func(l *ratelimit.Limiter) (any, error) { return l.Delete(t.Context()) }, true, -1},
		} {
			for _, fault := range harness.Faults {
				if fault == harness.Silence || fault == harness.Repeat && what == "TrySetRate" || fault == harness.Resend {
					continue
				}
				t.Run(what+" "+fault.String(), func(t *testing.T) {
					harness.Do(t, s.Addr, "FLUSHALL")
					c, g := harness.GatedClient(t, s)
					l := c.RateLimiter(key)
					harness.Load(t, s.Addr, row.files...)
					if what != "TrySetRate" {
						setRate(t, l, 10, long)
						require.NoError(t, l.TryAcquire(t.Context(), 4))
					}
					var got any
					var err error
					g.During(t, fault, harness.SHA(t, row.files...), func() { got, err = row.call(l) })
					require.NoError(t, g.Open())
					require.NoError(t, err)
					require.Equal(t, row.want, got)
					free, err := l.Available(t.Context())
					if row.free < 0 {
						require.ErrorIs(t, err, ratelimit.ErrNotFound)
						return
					}
					require.NoError(t, err)
					require.Equal(t, row.free, free)
				})
			}
		}
	})
}

// Waiters outlast a server that is gone for a while.
func TestOutage(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(2, 100*time.Millisecond))
		require.NoError(t, l.TryAcquire(t.Context(), 2))
		g.Stall()
		waits := start(t, t.Context(), l, 1)
		require.Error(t, l.Acquire(t.Context(), 1, lock.Wait(50*time.Millisecond)))
		require.NoError(t, g.Open())
		require.NoError(t, waits.EndWithin(10*time.Second))
	})
}

// The time that a call of a client of its own needs under testing/synctest is that of the window.
func TestVirtualTime(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		l := s.Client(t).RateLimiter(key, ratelimit.Rate(1, time.Hour), ratelimit.KeepAlive(2*time.Hour))
		require.NoError(t, l.Acquire(t.Context(), 1))
		began := time.Now()
		require.NoError(t, l.Acquire(t.Context(), 1))
		took := time.Since(began)
		require.InDelta(t, time.Hour, took, float64(time.Second))

		// It expires when it has not been used.
		time.Sleep(2*time.Hour + time.Second)
		_, err := l.Config(t.Context())
		require.ErrorIs(t, err, ratelimit.ErrNotFound)
	})
}

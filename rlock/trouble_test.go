package rlock_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// trouble is a server that does not serve for a while.
type trouble struct {
	name string
	args []string // of the server
	// begin brings it about and returns what ends it, or waits for its end.
	begin  func(t *testing.T, s *testserver.Server) (end func())
	silent bool // the server does not answer at all
	renews bool // renewals get through
}

// paused is a server on which CLIENT PAUSE stops commands of a kind, for longer
// than the shortest lease of the test.
func paused(kind string) trouble {
	const pause = "2500"
	return trouble{
		name: "client pause " + kind, silent: true,
		begin: func(t *testing.T, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "CLIENT", "PAUSE", pause, kind)
			return func() { harness.Do(t, s.Addr, "EVAL", "return redis.call('DEL', 'none')", "1", "none") }
		},
	}
}

var troubles = []trouble{
	paused("WRITE"),
	paused("ALL"),
	{
		name: "busy",
		begin: func(t *testing.T, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "CONFIG", "SET", "lua-time-limit", "10")
			go func() { _, _ = testserver.Command(s.Addr, "EVAL", "while true do end", "0") }()
			answers(t, s, "-BUSY")
			return func() { harness.Do(t, s.Addr, "SCRIPT", "KILL") }
		},
	},
	{
		name: "loading",
		// The delay is in microseconds; the server answers between chunks of that
		// many bytes.
		args: []string{"--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024", "--rdbcompression", "no"},
		begin: func(t *testing.T, s *testserver.Server) func() {
			const keys = "220"
			harness.Do(t, s.Addr, "EVAL", "for i = 1, ARGV[1] do redis.call('SET', 'filler:' .. i, string.rep('x', 1000)) end", "0", keys)
			harness.Do(t, s.Addr, "SAVE")
			s.Kill()
			require.NoError(t, s.Restart())
			answers(t, s, "-LOADING")
			return func() {
				answers(t, s, "+PONG")
				harness.Do(t, s.Addr, "EVAL", "for i = 1, ARGV[1] do redis.call('DEL', 'filler:' .. i) end", "0", keys)
			}
		},
	},
	{
		name: "no more clients",
		begin: func(t *testing.T, s *testserver.Server) func() {
			// One connection stays, and takes the only place.
			conn, release := harness.Conn(t, s.Addr).Dedicate()
			do := func(words ...string) {
				require.NoError(t, conn.Do(context.Background(), conn.B().Arbitrary(words...).Build()).Error())
			}
			do("CONFIG", "SET", "maxclients", "1")
			do("CLIENT", "KILL", "TYPE", "pubsub")
			do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			return func() {
				do("CONFIG", "SET", "maxclients", "1000")
				release()
			}
		},
	},
	{
		name: "out of memory", renews: true,
		begin: func(t *testing.T, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")
			return func() { harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0") }
		},
	},
}

// answers waits until the server answers PING with that.
func answers(t *testing.T, s *testserver.Server, prefix string) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the server answers "+prefix, func() bool {
		reply, err := testserver.Command(s.Addr, "PING")
		return err == nil && strings.HasPrefix(reply, prefix)
	})
}

// Holders keep what they can renew in time and hear of what they cannot; waiters
// ride the trouble out for as long as their watchdog timeout, and no longer; and
// afterwards everything works.
func TestServerInTrouble(t *testing.T) {
	const (
		// Timeouts of the watchdog: trouble lasts for longer than the first ones and
		// less than the last.
		impatient, short, long = 300 * time.Millisecond, 1500 * time.Millisecond, 6 * time.Second
		// soon is after the trouble has begun, and well before it ends.
		soon = 700 * time.Millisecond
		// retryPause is the longest pause of a waiter between two attempts that fail.
		retryPause = time.Second
		slack      = 3 * time.Second
	)
	for _, tr := range troubles {
		t.Run(tr.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, shared *testserver.Server) {
				s := harness.Own(t, shared.Program, tr.args...)
				client := func(timeout time.Duration) *redlatch.Client {
					return harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
				}
				brief, lasting, waiting, hurried := client(short), client(long), client(long), client(impatient)
				curt, err := redlatch.New(t.Context(), rueidis.ClientOption{
					InitAddress: []string{s.Addr}, ConnWriteTimeout: time.Second, Dialer: net.Dialer{KeepAlive: 200 * time.Millisecond},
				})
				require.NoError(t, err)
				t.Cleanup(curt.Close)

				lost, kept := mustLock(t, brief.Lock("lost")), mustLock(t, lasting.Lock("kept"))
				behind := func(c *redlatch.Client, name string) <-chan error {
					done, others := make(chan error, 1), c.PubSub().Subscribed
					go func() { done <- c.Lock(name).Do(context.Background(), nothing) }()
					harness.Eventually(t, 5*time.Second, "it waits", func() bool { return c.PubSub().Subscribed > others })
					return done
				}
				waiters := map[string]<-chan error{
					"behind a holder that is lost":        behind(waiting, "lost"),
					"behind a holder that goes on":        behind(waiting, "kept"),
					"behind a holder of the same process": behind(lasting, "kept"),
				}
				free := mustLock(t, brief.Lock("free soon"), lock.Lease(soon))
				waiters["of a lock whose lease is over"] = behind(waiting, "free soon")
				left := behind(hurried, "free soon")
				gone, gaveUp := make(chan error, 1), time.Time{}
				go func() {
					err := <-left
					gaveUp = time.Now()
					gone <- err
				}()
				lease, looks := time.Now().Add(lost.Remaining()), time.Now().Add(free.Remaining())
				begin := time.Now()
				end := tr.begin(t, s)
				if now := time.Now(); now.After(looks) {
					looks = now
				}

				_, err = curt.Lock("new").TryLock(t.Context())
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
				if tr.renews {
					harness.Eventually(t, 2*short, "the lease is renewed", func() bool {
						return time.Now().Add(lost.Remaining()).After(lease.Add(short / 4))
					})
				} else {
					select {
					case <-lost.Context().Done():
					case <-time.After(short + time.Second):
						require.FailNow(t, "the hold does not end")
					}
					var lostErr *lock.LostError
					require.ErrorAs(t, context.Cause(lost.Context()), &lostErr)
					require.Equal(t, lock.ReasonExpired, lostErr.Reason)
					require.Error(t, lostErr.Err)
				}
				if tr.silent {
					waiters["in a hurry"] = gone // that has nothing to be impatient with
				} else {
					select {
					case err = <-gone:
					case <-time.After(time.Until(looks) + impatient + retryPause + slack):
						require.FailNow(t, "a waiter is too patient")
					}
					require.Error(t, err)
					require.NotErrorIs(t, err, lock.ErrNotAcquired)
					require.GreaterOrEqual(t, gaveUp.Sub(begin), impatient)
					require.Less(t, gaveUp.Sub(looks), impatient+retryPause+slack)
				}
				end()

				if err := lost.Unlock(t.Context()); tr.renews {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, lock.ErrLost)
				}
				require.ErrorIs(t, free.Unlock(t.Context()), lock.ErrLost)
				harness.Eventually(t, long, "the other lease is renewed", func() bool { return kept.Remaining() > long*9/10 })
				require.Equal(t, 1, harness.HoldCount(t, waiting.Lock("kept"), kept.Owner()))
				require.NoError(t, kept.Unlock(t.Context()))
				for name, done := range waiters {
					select {
					case err := <-done:
						require.NoError(t, err, name)
					case <-time.After(10 * time.Second):
						require.FailNow(t, "a waiter hangs", name)
					}
				}
				for _, c := range []*redlatch.Client{brief, lasting, waiting, hurried, curt} {
					require.NoError(t, c.Lock("new").Do(t.Context(), nothing))
				}
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

// Somebody deletes the key of a lock by hand, or puts something else there, while
// others wait. No message tells them.
func TestWaitersOfAKeyThatIsMeddledWith(t *testing.T) {
	const timeout = 2 * time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, m := range []struct {
			name   string
			meddle []string
			want   string // what waiters end with
		}{
			{"deleted", []string{"DEL", "orders"}, ""},
			{"of another type", []string{"SET", "orders", "precious"}, "WRONGTYPE"},
		} {
			for _, where := range []string{"here", "elsewhere"} {
				t.Run(m.name+", held "+where, func(t *testing.T) {
					harness.Do(t, s.Addr, "FLUSHALL")
					c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
					// The holder hears of it at its next renewal, and tells the waiters of
					// its process; others look when its lease would be over.
					holder, attempts, bound := c, 1, timeout/3+time.Second
					if where == "elsewhere" {
						bound = timeout + time.Second
						holder, attempts = harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), 2
					}
					h := mustLock(t, holder.Lock("orders"))
					first := waitFor(t, s, c.Lock("orders"), attempts)
					second := make(chan error, 1)
					go func() { second <- c.Lock("orders").Do(context.Background(), nothing) }()
					harness.Eventually(t, 5*time.Second, "both wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == 2 })
					harness.Do(t, s.Addr, m.meddle...)
					begin := time.Now()
					for _, done := range []<-chan error{first, second} {
						if err := <-done; m.want == "" {
							require.NoError(t, err)
						} else {
							require.ErrorContains(t, err, m.want)
							require.NotErrorIs(t, err, lock.ErrNotAcquired)
						}
					}
					require.Less(t, time.Since(begin), bound)
					select {
					case <-h.Context().Done():
					case <-time.After(timeout):
						require.FailNow(t, "the hold does not end")
					}
					var lost *lock.LostError
					require.ErrorAs(t, context.Cause(h.Context()), &lost)
					require.Equal(t, lock.ReasonGone, lost.Reason)
					require.Equal(t, error(lost), h.Unlock(t.Context()))
					if m.want != "" {
						require.Equal(t, ":1", harness.Do(t, s.Addr, "DEL", "orders"))
					}
					require.NoError(t, c.Lock("orders").Do(t.Context(), nothing))
					harness.NothingLeft(t, s.Addr)
				})
			}
		}
	})
}

// Subscriptions are confirmed and no message ever arrives: every waiter gets the
// lock all the same, when the lease it waits for would be over or at its next
// safety poll.
func TestAllMessagesAreLost(t *testing.T) {
	const (
		safetyPoll = 5 * time.Second
		slack      = 2 * time.Second
	)
	for _, m := range []struct {
		name        string
		timeout     time.Duration // of the watchdog
		clients     int
		waitersEach int
		perHandOver time.Duration // from client to client
	}{
		{name: "short leases", timeout: time.Second, clients: 2, waitersEach: 10, perHandOver: time.Second},
		{name: "long leases", timeout: 30 * time.Second, clients: 2, waitersEach: 2, perHandOver: safetyPoll},
	} {
		t.Run(m.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				holder := harness.Client(t, s, redlatch.WithWatchdogTimeout(m.timeout))
				h := mustLock(t, holder.Lock("orders"))
				var clients []*redlatch.Client
				done := make(chan error, m.clients*m.waitersEach)
				for range m.clients {
					c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(m.timeout))
					g.Mute()
					clients = append(clients, c)
					for range m.waitersEach {
						go func() { done <- c.Lock("orders").Do(context.Background(), nothing) }()
					}
				}
				for _, c := range clients {
					harness.Eventually(t, 5*time.Second, "it is subscribed", func() bool { return c.PubSub().Subscribed == 1 })
				}
				harness.Eventually(t, 5*time.Second, "all wait", func() bool {
					return harness.GoroutinesIn("(*Waiter).wait") == cap(done) && harness.GoroutinesIn("(*Waiter).attempt") == 0
				})
				require.NoError(t, h.Unlock(t.Context()))
				deadline := time.After(time.Duration(m.clients)*m.perHandOver + slack)
				for range cap(done) {
					select {
					case err := <-done:
						require.NoError(t, err)
					case <-deadline:
						require.FailNow(t, "a waiter hangs")
					}
				}
				for _, c := range clients {
					require.Zero(t, c.PubSub().Messages)
				}
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

package redlatch_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/rlock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

func nothing(context.Context) error { return nil }

const (
	// patience is for what takes a moment on an idle machine.
	patience = 30 * time.Second
	// slack is how late something may be that is due now: sooner than the safety poll.
	slack = 3500 * time.Millisecond
)

// works takes a lock twice at once, so that one of them waits and is woken. Nobody else of
// the client waits.
func works(t *testing.T, c *redlatch.Client, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	h, err := c.Lock(name).Lock(ctx)
	require.NoError(t, err)
	waited := make(chan error, 1)
	go func() { waited <- c.Lock(name).Do(ctx, nothing) }()
	harness.Waits(t, 1, c)
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waited)
	locked, err := c.Lock(name).IsLocked(ctx)
	require.NoError(t, err)
	require.False(t, locked)
}

func TestOpen(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, err := redlatch.Open(t.Context(), s.URL())
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.Ping(t.Context()))
		works(t, c, "orders")
		c.Close()
		require.ErrorIs(t, c.Ping(t.Context()), lock.ErrClosed)
	})
}

func TestOpenFailsFast(t *testing.T) {
	before := goleak.IgnoreCurrent()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	silent := l.Addr().String()
	defer l.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nobody := closed.Addr().String()
	require.NoError(t, closed.Close())

	_, err = redlatch.Open(t.Context(), "redis://"+nobody)
	require.ErrorContains(t, err, nobody)

	// A server that accepts and says nothing: the context bounds the wait.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = redlatch.Open(ctx, "redis://"+silent) // without it, it is os.ErrDeadlineExceeded
	require.ErrorIs(t, err, context.DeadlineExceeded)

	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	_, err = redlatch.Open(ctx, "redis://"+nobody)
	require.ErrorIs(t, err, context.Canceled)

	// The attempt that was abandoned ends with its dialer's timeout.
	l.Close()
	harness.Eventually(t, 20*time.Second, "the dialer gives up", func() bool { return goleak.Find(before) == nil })
}

func TestOpenRefusesBadURLs(t *testing.T) {
	for _, urls := range [][]string{nil, {""}, {"http://localhost"}, {"redis://localhost/x"}, {"redis://localhost", "://secret@"}} {
		_, err := redlatch.Open(t.Context(), urls...)
		require.ErrorIs(t, err, lock.ErrInvalid, "%q", urls)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestBadOptions(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for name, opt := range map[string]redlatch.Option{
			"no watchdog timeout":       redlatch.WithWatchdogTimeout(0),
			"negative watchdog timeout": redlatch.WithWatchdogTimeout(-time.Second),
			"tiny watchdog timeout":     redlatch.WithWatchdogTimeout(time.Millisecond),
			"no fair wait":              redlatch.WithFairWaitTimeout(0),
			"negative hand-offs":        redlatch.WithHandOffLimit(-1),
			"nil name mapper":           redlatch.WithNameMapper(nil),
			"nil logger":                redlatch.WithLogger(nil),
			"unknown mode":              redlatch.WithPubSubMode(99),
			"sharded without a cluster": redlatch.WithPubSubMode(pubsub.Sharded),
			"nil":                       nil,
		} {
			_, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}}, opt)
			require.ErrorIs(t, err, lock.ErrInvalid, name)
		}
		_, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, ReplicaOnly: true})
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = redlatch.Wrap(t.Context(), nil)
		require.ErrorIs(t, err, lock.ErrInvalid)
	})
}

// rueidis resends what only reads for as long as the context allows.
func TestABorrowedConnectionThatRetriesDoesNotHang(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		c, err := redlatch.Wrap(t.Context(), conn)
		require.NoError(t, err)
		defer c.Close()
		works(t, c, "orders")
		s.Kill()
		done := make(chan struct{})
		go func() {
			defer close(done)
			ctx := context.Background()
			for _, err := range []error{
				c.Ping(ctx),
				second(c.Lock("orders").IsLocked(ctx)),
				second(c.Lock("orders").TTL(ctx)),
				second(c.Lock("orders").HoldCount(ctx, c.NewOwner())),
				second(c.Lock("orders").ForceUnlock(ctx)),
				second(c.Lock("orders").TryLock(ctx)),
			} {
				assert.Error(t, err)
			}
		}()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			require.Fail(t, "a call hangs")
		}
	})
}

func second[T any](_ T, err error) error { return err }

// Connections are replaced all the time: nothing is lost with them.
func TestShortLivedConnections(t *testing.T) {
	const lifetime, timeout = 150 * time.Millisecond, 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		connections := func() int {
			stats, err := testserver.Info(s.Addr, "stats")
			require.NoError(t, err)
			n, err := strconv.Atoi(stats["total_connections_received"])
			require.NoError(t, err)
			return n
		}
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, ConnLifetime: lifetime},
			redlatch.WithWatchdogTimeout(timeout))
		require.NoError(t, err)
		defer c.Close()
		h, err := c.Lock("held").Lock(t.Context())
		require.NoError(t, err)
		works(t, c, "orders") // has every kind of connection made
		before := connections()
		begin := time.Now()
		for replaced, looks := 0, 1; replaced < 5 || !renewed(h, begin.Add(2*timeout)); looks++ {
			works(t, c, "orders")
			replaced = connections() - before - looks // which are connections, too
			require.Less(t, time.Since(begin), patience, "connections are not replaced")
		}
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// The connection of all other commands is stuck for longer than the lease:
// renewals do not queue behind them.
func TestRenewalsDoNotQueueBehindOtherCommands(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{
			// No ping but that of the test, and nobody gives the connection up.
			InitAddress: []string{g.Addr}, ConnWriteTimeout: time.Minute, Dialer: net.Dialer{KeepAlive: -1},
		}, redlatch.WithWatchdogTimeout(timeout))
		require.NoError(t, err)
		t.Cleanup(c.Close)
		t.Cleanup(func() { _ = g.Open() })
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		reached := g.Arm(harness.KeepReply, "PING", 1)
		answered := make(chan error, 1)
		go func() { answered <- c.Ping(context.Background()) }()
		<-reached
		stuck := time.Now()
		harness.Eventually(t, 3*timeout, "the lease is renewed again and again", func() bool {
			return time.Now().Add(h.Remaining()).After(stuck.Add(timeout*5/2)) || h.Context().Err() != nil
		})
		require.NoError(t, context.Cause(h.Context()))
		require.Empty(t, answered)
		require.NoError(t, g.Open())
		require.NoError(t, <-answered)
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A lock that nobody else wants costs two requests, and their scripts do no more than this.
func TestUncontendedPairIsTwoCommands(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		ctx := t.Context()
		named, again := lock.WithOwner(ctx, c.NewOwner()), lock.WithOwner(ctx, c.NewOwner())
		held, err := c.Lock("held").Lock(again, lock.Lease(time.Hour))
		require.NoError(t, err)
		permits, numbered, latch := c.PermitSemaphore("permits"), c.Semaphore("semaphore"), c.CountDownLatch("latch")
		require.NoError(t, permits.AddPermits(ctx, 2))
		require.NoError(t, numbered.AddPermits(ctx, 2))
		of := func(ctx context.Context, l lock.Locker) func() error {
			return func() error { return l.Do(ctx, nothing) }
		}
		for _, k := range []struct {
			name string
			pair func() error
			want string
		}{
			{"lock", of(ctx, c.Lock("a")), "evalsha 2: del 1, exists 1, hget 1, hset 1, pexpire 1, publish 1"},
			{"lock of a named owner", of(named, c.Lock("a")), "evalsha 2: del 2, exists 1, get 2, hget 1, hincrby 1, pexpire 1, pttl 1, publish 1, set 2"},
			{"re-entry", of(again, c.Lock("held")), "evalsha 2: del 1, exists 1, get 2, hexists 1, hget 1, hincrby 2, pttl 1, set 2"},
			{"fenced", of(ctx, c.FencedLock("a")), "evalsha 2: del 1, exists 1, hget 1, hset 1, incr 1, pexpire 1, publish 1"},
			{"spin", of(ctx, c.SpinLock("a")), "evalsha 2: del 1, exists 1, hget 1, hset 1, pexpire 1"},
			{"plain", of(ctx, c.PlainLock("a")), "evalsha 2: del 1, get 1, publish 1, set 1"},
			{"fair", of(ctx, c.FairLock("a")), "evalsha 2: del 1, exists 2, hget 1, hset 1, pexpire 1"},
			{"read", of(ctx, c.RWLock("a").Read()), "evalsha 2: del 3, exists 2, hdel 1, hget 1, hlen 1, hmget 1, hset 1, pexpire 1, pttl 2, publish 1, set 1"},
			{"write", of(ctx, c.RWLock("a").Write()), "evalsha 2: del 2, exists 1, hdel 1, hgetall 1, hmget 2, hset 1, pexpire 1, pttl 1, publish 1"},
			{"multi", of(ctx, c.MultiLock(c.Lock("a"), c.Lock("b"))), "evalsha 2: del 2, exists 2, hget 2, hset 2, pexpire 2, publish 2"},
			{"red", of(ctx, c.RedLock(c.Lock("a"))), "evalsha 2: del 1, exists 1, hget 1, hset 1, pexpire 1, publish 1"},
			{"semaphore", func() error {
				if err := numbered.Acquire(ctx, 1); err != nil {
					return err
				}
				return numbered.Release(ctx, 1)
			}, "evalsha 2: get 4, incrby 2, publish 1, set 2, zrange 2, zrem 1"},
			{"permit semaphore", func() error {
				p, err := permits.Acquire(ctx)
				if err != nil {
					return err
				}
				return p.Release(ctx)
			}, "evalsha 2: get 4, incrby 2, pttl 2, publish 1, set 2, time 2, zadd 2, zrange 2, zrangebyscore 1, zrem 4, zscore 1"},
			{"latch", func() error {
				if _, err := latch.TrySetCount(ctx, 1); err != nil {
					return err
				}
				return second(latch.CountDown(ctx))
			}, "evalsha 2: del 2, get 2, publish 2, set 2"},
		} {
			require.NoError(t, k.pair()) // loads the scripts
			harness.Idle(t, c)           // the ticket of a re-entry goes in the background
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			const pairs = 20
			for range pairs {
				require.NoError(t, k.pair(), k.name)
			}
			harness.Idle(t, c)
			calls := harness.Commands(t, conn)
			var of []string
			for name, n := range calls {
				switch name {
				case "config|resetstat", "ping", "evalsha": // ping is of the connections
				default:
					of = append(of, fmt.Sprint(name, " ", float64(n)/pairs))
				}
			}
			slices.Sort(of)
			assert.Equal(t, k.want, fmt.Sprint("evalsha ", float64(calls["evalsha"])/pairs, ": ", strings.Join(of, ", ")), k.name)
		}
		require.NoError(t, held.Unlock(ctx))
	})
}

func TestHandOffIsOneCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const waiters = 10 // fewer than the limit of hand-offs
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := c.Lock("orders")
		works(t, c, "other") // loads the scripts
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		holds := make(chan lock.Hold)
		for range waiters {
			go func() {
				h, err := l.Lock(context.Background())
				assert.NoError(t, err)
				holds <- h
			}()
		}
		asleep(t, conn, waiters, 1, c) // the attempt is that after the subscription
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for range waiters {
			require.NoError(t, h.Unlock(t.Context()))
			h = <-holds
		}
		calls := harness.Commands(t, conn)
		assert.Equal(t, waiters, calls["evalsha"])
		assert.Zero(t, calls["publish"])
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// asleep blocks until n callers of a client wait, and the attempts they have made are over:
// that many since CONFIG RESETSTAT.
func asleep(t *testing.T, conn rueidis.Client, n, attempts int, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, patience, fmt.Sprint(n, " callers that wait after ", attempts, " attempts"), func() bool {
		return harness.Commands(t, conn)["evalsha"] >= attempts && harness.Waiting(n, c)
	})
}

func TestHandOffsGiveOtherProcessesTheirTurn(t *testing.T) {
	const limit, turns = 4, 3
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond
		here, there := s.Client(t, redlatch.WithHandOffLimit(limit)), s.Client(t, redlatch.WithHandOffLimit(limit))
		h, err := here.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		want, got := []string{"here"}, []string{"here"} // the holders, in order
		var waiters sync.WaitGroup
		wait := func(c *redlatch.Client, name string) {
			want = append(want, name)
			waiters.Go(func() {
				assert.NoError(t, c.Lock("orders").Do(t.Context(), func(context.Context) error {
					got = append(got, name)
					return nil
				}))
			})
		}
		for turn := range turns {
			for n := range 1 + limit {
				if turn > 0 || n > 0 {
					wait(here, "here")
				}
			}
			for range 1 + limit {
				wait(there, "there")
			}
		}
		time.Sleep(time.Second)
		require.NoError(t, h.Unlock(t.Context()))
		waiters.Wait()
		require.Equal(t, want, got)
	})
}

func TestServerStopped(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s)
		works(t, c, "orders")
		s.Kill()
		_, err := c.Lock("orders").Lock(t.Context(), lock.Wait(5*time.Second), lock.Lease(10*time.Second))
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		_, err = c.Lock("orders").TryLock(t.Context())
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, s.Restart())
		harness.Eventually(t, 10*time.Second, "the connection is back", func() bool { return c.Ping(t.Context()) == nil })
		works(t, c, "orders")
	})
}

// A restarted server is empty: what was held is lost, and the watchdog renews
// what is taken afterwards, again and again.
func TestWatchdogAfterARestart(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		l := c.Lock("orders")
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		s.Kill()
		require.NoError(t, s.Restart())
		select {
		case <-h.Context().Done():
		case <-time.After(timeout + slack):
			require.Fail(t, "the hold does not end")
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		harness.Eventually(t, 10*time.Second, "the connection is back", func() bool { return c.Ping(t.Context()) == nil })
		for range 2 {
			h, err = l.Lock(t.Context())
			require.NoError(t, err)
			areRenewed(t, timeout, h)
			require.NoError(t, h.Unlock(t.Context()))
		}
	})
}

// renewed reports whether a hold is certain until then.
func renewed(h lock.Hold, until time.Time) bool { return time.Now().Add(h.Remaining()).After(until) }

// areRenewed blocks until holds of that lease have been renewed several times.
func areRenewed(t *testing.T, lease time.Duration, holds ...lock.Hold) {
	t.Helper()
	begin := time.Now()
	for _, h := range holds {
		harness.Eventually(t, 3*lease+slack, "renewals of "+h.Name(), func() bool {
			return renewed(h, begin.Add(2*lease)) || h.Context().Err() != nil
		})
		require.NoError(t, context.Cause(h.Context()), h.Name())
	}
}

// A hold is noticed by a finalizer, and those of a process run one after the other.
func TestALoggerThatBlocksHoldsUpNoFinalizers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		logging, blocked := make(chan struct{}, 1), make(chan struct{})
		goOn := sync.OnceFunc(func() { close(blocked) })
		defer goOn()
		log := slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
			logging <- struct{}{}
			<-blocked
			return len(b), nil
		}), nil))
		c := harness.Client(t, s, redlatch.WithLogger(log), redlatch.WithoutStartupChecks())
		_, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		harness.Eventually(t, 10*time.Second, "it is logged", func() bool {
			runtime.GC()
			return len(logging) > 0
		})
		other := make(chan struct{})
		func() { runtime.SetFinalizer(new([1]*int), func(*[1]*int) { close(other) }) }()
		harness.Eventually(t, 10*time.Second, "another finalizer runs", func() bool {
			runtime.GC()
			select {
			case <-other:
				return true
			default:
				return false
			}
		})
		goOn()
		harness.Eventually(t, 10*time.Second, "the lock is free", func() bool {
			locked, err := c.Lock("orders").IsLocked(t.Context())
			return err == nil && !locked
		})
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestManyHoldsAreRenewedTogether(t *testing.T) {
	const timeout, holds = 2 * time.Second, 500
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Conn(t, s.Addr)
		all := takeAll(t, c, names(holds))
		// One of them becomes something else: it alone is lost.
		harness.Do(t, s.Addr, "SET", all[7].Name(), "precious")
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		isLost(t, timeout+slack, all[7], lock.ReasonGone)
		all = slices.Delete(all, 7, 8)
		areRenewed(t, timeout, all...)
		calls := harness.Commands(t, conn)
		require.GreaterOrEqual(t, calls["hexists"], 3*holds, "keys renewed")
		require.Greater(t, calls["hexists"]/calls["evalsha"], 4, "keys renewed by one script")
		unlockAll(t, all)
	})
}

// A server without a place for another client says so before it is asked. A call
// whose context has ended by then gives the new connection up unused.
func TestTheServerSpeaksFirst(t *testing.T) {
	full, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer full.Close()
	go func() {
		for {
			conn, err := full.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("-ERR max number of clients reached\r\n"))
			conn.Close()
		}
	}()
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var leave atomic.Pointer[context.CancelFunc] // of the call under way, when the server is full
		var dials atomic.Int32
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{
			InitAddress: []string{s.Addr},
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				if leave := leave.Load(); leave != nil {
					defer (*leave)()
					dials.Add(1)
					addr = full.Addr().String()
				}
				return d.DialContext(ctx, "tcp", addr)
			},
		})
		require.NoError(t, err)
		defer c.Close()
		ping := func() error {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			leave.Store(&cancel)
			return c.Ping(ctx)
		}
		require.NoError(t, ping())
		harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
		harness.Eventually(t, 10*time.Second, "many connections were given up", func() bool {
			require.True(t, ping() != nil || dials.Load() == 0)
			return dials.Load() >= 100
		})
		leave.Store(nil)
		works(t, c, "orders")
	})
}

// documentedRights returns the words of the first ACL SETUSER in the
// documentation after that text, and what the rows of a table add that begin
// with the others.
func documentedRights(t *testing.T, after string, rows ...string) []string {
	t.Helper()
	text, err := os.ReadFile("docs/operations.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), after)
	require.True(t, found, after)
	_, rest, found = strings.Cut(rest, "    ACL SETUSER ")
	require.True(t, found)
	block, _, _ := strings.Cut(rest, "\n\n")
	words := append([]string{"ACL", "SETUSER"}, strings.Fields(block)...)
	for _, row := range rows {
		_, rest, found := strings.Cut(string(text), "| "+row)
		require.True(t, found, row)
		line, _, _ := strings.Cut(rest, "\n")
		for i, quoted := range strings.Split(line, "`") {
			if i%2 == 1 {
				words = append(words, strings.Fields(quoted)...)
			}
		}
	}
	return words
}

// everythingWorks uses all that needs a right. A connection may do everything.
func everythingWorks(t *testing.T, conn rueidis.Client, c, other *redlatch.Client) {
	t.Helper()
	works(t, c, "app:orders")
	require.NoError(t, c.FencedLock("app:fenced").Do(t.Context(), nothing))
	named := lock.WithOwner(t.Context(), c.NewOwner())
	require.NoError(t, c.FencedLock("app:named").Do(named, nothing))
	h, err := c.Lock("app:orders").Lock(t.Context())
	require.NoError(t, err)
	count, err := c.Lock("app:orders").HoldCount(t.Context(), h.Owner())
	require.NoError(t, err)
	require.Equal(t, 1, count)
	require.NoError(t, h.Extend(t.Context(), time.Minute))
	forced, err := c.Lock("app:orders").ForceUnlock(t.Context())
	require.NoError(t, err)
	require.True(t, forced)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	_, err = c.FencedLock("app:fenced").ResetTokens(t.Context())
	require.NoError(t, err)

	// Woken by message: the lease is no help.
	h, err = other.Lock("app:theirs").Lock(t.Context(), lock.Lease(time.Hour))
	require.NoError(t, err)
	waiter := make(chan error, 1)
	go func() { waiter <- c.Lock("app:theirs").Do(context.Background(), nothing) }()
	listening(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, <-waiter)
	require.Greater(t, c.PubSub().Messages, before)
	_, err = c.Lock("elsewhere").TryLock(t.Context())
	require.ErrorContains(t, err, "NOPERM")

	fairWorks(t, c, other)
	rwWorks(t, c, other)
	semaphoresWork(t, conn, c, other)
	latchWorks(t, c, other)
	plainWorks(t, c, other)
}

// plainWorks uses all of a plain lock that needs a right.
func plainWorks(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	l, theirs := c.PlainLock("app:plain"), other.PlainLock("app:plain")
	h, err := theirs.Lock(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	waiter := make(chan error, 1)
	go func() { waiter <- l.Do(context.Background(), nothing) }()
	listening(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waiter)
	harness.Eventually(t, 5*time.Second, "it is told", func() bool { return c.PubSub().Messages > before })

	h, err = l.Lock(ctx)
	require.NoError(t, err)
	go func() { waiter <- l.Do(context.Background(), nothing) }()
	listening(t, c, 1)
	require.NoError(t, h.Unlock(ctx)) // hands it over
	require.NoError(t, <-waiter)

	named := lock.WithOwner(ctx, c.NewOwner())
	h, err = l.Lock(named)
	require.NoError(t, err)
	require.NoError(t, h.Extend(ctx, time.Minute))
	require.NoError(t, theirs.Unlock(named))
	require.ErrorIs(t, l.Unlock(named), lock.ErrLost)
	_, err = l.Lock(ctx)
	require.NoError(t, err)
	forced, err := l.ForceUnlock(ctx)
	require.NoError(t, err)
	require.True(t, forced)
	_, err = c.PlainLock("elsewhere").TryLock(ctx)
	require.ErrorContains(t, err, "NOPERM")
}

// semaphoresWork uses all of both semaphores that needs a right.
func semaphoresWork(t *testing.T, conn rueidis.Client, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	s, e := c.Semaphore("app:semaphore"), c.PermitSemaphore("app:permits")
	for _, try := range []func(context.Context, int) (bool, error){s.TrySetPermits, e.TrySetPermits} {
		set, err := try(ctx, 2)
		require.NoError(t, err)
		require.True(t, set)
	}
	require.NoError(t, s.AddPermits(ctx, 1))
	n, err := s.Drain(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, n)

	// A waiter is woken by message, also when it has a queue position. One that gives up
	// makes way for the next.
	for range 2 {
		waitCtx, leave := context.WithCancel(ctx)
		left, served := make(chan error, 1), make(chan error, 1)
		go func() { left <- s.Acquire(waitCtx, 3) }()
		harness.Waits(t, 1, c)
		go func() { served <- s.Acquire(ctx, 3) }()
		harness.Waits(t, 2, c)
		listening(t, c, 1)
		harness.Eventually(t, 5*time.Second, "a queue position", func() bool {
			n, err := conn.Do(ctx, conn.B().Zcard().Key(wire.SemaphoreWaiting("app:semaphore")).Build()).AsInt64()
			require.NoError(t, err)
			return n > 0
		})
		leave()
		require.ErrorIs(t, <-left, lock.ErrNotAcquired)
		require.NoError(t, other.Semaphore("app:semaphore").Release(ctx, 3))
		require.NoError(t, <-served)
	}
	exists, err := s.ReleaseIfExists(ctx, 3)
	require.NoError(t, err)
	require.True(t, exists)
	n, err = s.Available(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, n)

	require.NoError(t, e.SetPermits(ctx, 3))
	require.NoError(t, e.AddPermits(ctx, 1))
	p, err := e.Acquire(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	require.NoError(t, p.Extend(ctx, 2*time.Hour))
	updated, err := e.UpdateLeaseTime(ctx, p.ID(), time.Minute)
	require.NoError(t, err)
	require.True(t, updated)
	_, err = e.LeaseTime(ctx, p.ID())
	require.NoError(t, err)
	waiting := make(chan error, 1)
	go func() {
		permits, err := e.AcquireN(ctx, 4, lock.Lease(200*time.Millisecond))
		if err == nil {
			<-permits[0].Context().Done()
		}
		waiting <- err
	}()
	listening(t, c, 1)
	require.NoError(t, p.Release(ctx))
	require.NoError(t, <-waiting)
	n, err = e.Permits(ctx)
	require.NoError(t, err)
	require.Equal(t, 4, n)
	permits, err := e.AcquireN(ctx, 4) // takes expired ones back
	require.NoError(t, err)
	for _, p := range permits {
		require.NoError(t, p.Release(ctx))
	}
}

// latchWorks uses all of a count-down latch that needs a right.
func latchWorks(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	l, theirs := c.CountDownLatch("app:import"), other.CountDownLatch("app:import")
	set, err := l.TrySetCount(t.Context(), 2)
	require.NoError(t, err)
	require.True(t, set)
	n, err := l.Count(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, n)
	before := c.PubSub().Messages
	waiter := make(chan error, 1)
	go func() { waiter <- l.Wait(context.Background()) }()
	listening(t, c, 1)
	n, err = l.CountDown(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, n)
	_, err = theirs.CountDown(t.Context())
	require.NoError(t, err)
	require.NoError(t, <-waiter)
	harness.Eventually(t, 5*time.Second, "it is told", func() bool { return c.PubSub().Messages > before })
	_, err = l.TrySetCount(t.Context(), 1)
	require.NoError(t, err)
	deleted, err := l.Delete(t.Context())
	require.NoError(t, err)
	require.True(t, deleted)
	_, err = c.CountDownLatch("elsewhere").Count(t.Context())
	require.ErrorContains(t, err, "NOPERM")
}

// listening waits until that many waiters have their subscriptions.
func listening(t *testing.T, c *redlatch.Client, waiters int) {
	t.Helper()
	harness.Eventually(t, 5*time.Second, "subscribed", func() bool {
		s := c.PubSub()
		return s.Listeners == waiters && s.Subscribed == s.Channels
	})
}

// fairWorks uses all of a fair lock that needs a right.
func fairWorks(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	l := c.FairLock("app:fair")
	h, err := other.FairLock("app:fair").Lock(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	served := make(chan int, 3)
	var wg sync.WaitGroup
	for i := range cap(served) {
		wg.Go(func() {
			assert.NoError(t, l.Do(ctx, func(context.Context) error { served <- i; return nil }))
		})
		harness.Eventually(t, 5*time.Second, "a queue position", func() bool {
			queue, err := l.Queue(ctx)
			require.NoError(t, err)
			return len(queue) == i+1
		})
	}
	_, err = l.Lock(ctx, lock.Wait(50*time.Millisecond)) // gives up its queue position
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	_, err = l.TryLock(ctx)
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	listening(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(ctx))
	wg.Wait()
	for i := range cap(served) {
		require.Equal(t, i, <-served)
	}
	require.Greater(t, c.PubSub().Messages, before)

	named := lock.WithOwner(ctx, c.NewOwner())
	require.NoError(t, l.Do(named, func(ctx context.Context) error { return l.Do(ctx, nothing) }))
	h, err = l.Lock(ctx)
	require.NoError(t, err)
	require.NoError(t, h.Extend(ctx, time.Minute))
	forced, err := l.ForceUnlock(ctx)
	require.NoError(t, err)
	require.True(t, forced)
	require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
}

// rwWorks uses all of a read-write lock that needs a right.
func rwWorks(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	rw, theirs := c.RWLock("app:rw"), other.RWLock("app:rw")
	h, err := theirs.Write().Lock(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	waiter := make(chan error, 1)
	go func() { waiter <- rw.Read().Do(ctx, nothing) }()
	listening(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waiter)
	require.Greater(t, c.PubSub().Messages, before)

	h, err = theirs.Read().Lock(ctx)
	require.NoError(t, err)
	_, err = rw.Write().Lock(ctx, lock.Wait(50*time.Millisecond)) // keeps readers out meanwhile
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	go func() { waiter <- rw.Write().Do(ctx, nothing) }()
	listening(t, c, 1)
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waiter)

	named := lock.WithOwner(ctx, c.NewOwner())
	h, err = rw.Write().Lock(named)
	require.NoError(t, err)
	require.NoError(t, rw.Read().Do(named, func(ctx context.Context) error {
		require.NoError(t, h.Unlock(ctx))
		reading, err := rw.Read().IsLocked(ctx)
		require.NoError(t, err)
		require.True(t, reading)
		return nil
	}))
	for _, side := range []interface {
		lock.Locker
		ForceUnlock(ctx context.Context) (bool, error)
	}{rw.Read(), rw.Write()} {
		h, err := side.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, h.Extend(ctx, time.Minute))
		forced, err := side.ForceUnlock(ctx)
		require.NoError(t, err)
		require.True(t, forced)
		require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
	}
}

func TestUserWithTheRightsOfTheDocumentation(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, documentedRights(t, "## Rights", "the startup checks")...)
		var log harness.Log
		opt, err := redlatch.ParseURL("redis://app:password@" + s.Addr)
		require.NoError(t, err)
		c, err := redlatch.New(t.Context(), opt, redlatch.WithLogger(log.Logger()))
		require.NoError(t, err)
		defer c.Close()
		r, err := c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		require.Len(t, r.Findings, 5)
		require.Equal(t, redlatch.KindFair, r.Findings[0].Kind)
		require.Equal(t, redlatch.KindReadWrite, r.Findings[1].Kind)
		require.Equal(t, redlatch.KindSemaphore, r.Findings[2].Kind)
		require.Equal(t, redlatch.KindLatch, r.Findings[3].Kind)
		require.Equal(t, redlatch.KindPlain, r.Findings[4].Kind)
		harness.Do(t, s.Addr, documentedRights(t, "## Rights", "fair locks", "read-write locks", "semaphores", "count-down latches", "plain locks")...)
		everythingWorks(t, harness.Conn(t, s.Addr), c, harness.Client(t, s))
		r, err = c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		require.Empty(t, r.Findings)
		require.Empty(t, log.String())
		_, err = redlatch.Open(t.Context(), "redis://app:wrong@"+s.Addr)
		require.ErrorContains(t, err, "WRONGPASS")

		_, err = redlatch.Open(t.Context(), "redis://app:password@"+s.Addr+"/1")
		require.ErrorContains(t, err, "NOPERM")
		harness.Do(t, s.Addr, documentedRights(t, "## Rights", "a database other than 0 (`redis://host/1`)")...)
		other, err := redlatch.Open(t.Context(), "redis://app:password@"+s.Addr+"/1")
		require.NoError(t, err)
		defer other.Close()
		works(t, other, "app:orders")
	})
}

func TestUserWithTheRightsOfTheDocumentationInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		var addrs []string
		for _, p := range cluster.Primaries {
			harness.Do(t, p.Addr, documentedRights(t, "## Rights", "fair locks", "read-write locks", "semaphores", "count-down latches", "plain locks", "a cluster", "the startup checks")...)
			addrs = append(addrs, p.Addr)
		}
		var log harness.Log
		opt := rueidis.ClientOption{InitAddress: addrs, Username: "app", Password: "password"}
		c, err := redlatch.New(t.Context(), opt, redlatch.WithLogger(log.Logger()))
		require.NoError(t, err)
		defer c.Close()
		everythingWorks(t, harness.ConnAt(t, addrs), c, harness.ClientAt(t, addrs))
		r, err := c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		require.Empty(t, r.Findings)
		require.Len(t, r.Nodes, len(addrs))
		require.Empty(t, log.String())
	})
}

func TestSubscribingForbidden(t *testing.T) {
	const (
		locks, waiters = 5, 3
		lease          = 700 * time.Millisecond
	)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "mute", "on", ">secret", "allkeys", "allchannels", "+@all", "-subscribe")
		opt, err := redlatch.ParseURL("redis://mute:secret@" + s.Addr)
		require.NoError(t, err)
		var log harness.Log
		c, err := redlatch.New(t.Context(), opt, redlatch.WithLogger(log.Logger()), redlatch.WithoutStartupChecks())
		require.NoError(t, err)
		defer c.Close()
		holder := harness.Client(t, s)
		for round := range 2 {
			var holds []lock.Hold
			var wg sync.WaitGroup
			for i := range locks {
				name := fmt.Sprint("orders ", i)
				h, err := holder.Lock(name).Lock(t.Context(), lock.Lease(lease))
				require.NoError(t, err)
				holds = append(holds, h)
				for range waiters {
					wg.Go(func() { assert.NoError(t, c.Lock(name).Do(context.Background(), nothing)) })
				}
			}
			begin := time.Now()
			wg.Wait()
			// By the lease alone: before any safety poll.
			require.Less(t, time.Since(begin), lease+slack, "round %d", round)
			for _, h := range holds {
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			}
		}
		require.Zero(t, c.PubSub().Subscribed)
		require.Equal(t, 1, strings.Count(log.String(), "refuses a subscription"), log.String())
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		harness.NothingLeft(t, s.Addr)
	})
}

func TestUnixSocket(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		dir, err := os.MkdirTemp("", "redlatch") // a short path: sockets allow about 100 characters
		require.NoError(t, err)
		defer os.RemoveAll(dir)
		socket := filepath.Join(dir, "s")
		harness.Own(t, shared.Program, "--unixsocket", socket)
		c, err := redlatch.Open(t.Context(), "unix://"+socket)
		require.NoError(t, err)
		defer c.Close()
		works(t, c, "orders")
	})
}

func TestTLS(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		dir := t.TempDir()
		cert, key, pool := selfSigned(t, dir)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		addr := l.Addr().String()
		_, port, _ := net.SplitHostPort(addr)
		require.NoError(t, l.Close())
		harness.Own(t, shared.Program, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key,
			"--tls-auth-clients", "no", "--tls-ca-cert-file", cert)
		opt, err := redlatch.ParseURL("rediss://" + addr)
		require.NoError(t, err)
		opt.TLSConfig.RootCAs = pool
		c, err := redlatch.New(t.Context(), opt)
		require.NoError(t, err)
		defer c.Close()
		works(t, c, "orders")
		_, err = redlatch.Open(t.Context(), "rediss://"+addr) // nobody vouches for the certificate
		require.ErrorContains(t, err, "certificate")
	})
}

func selfSigned(t *testing.T, dir string) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	require.NoError(t, os.WriteFile(certFile, certPEM, 0o600))
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	pool = x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(certPEM))
	return certFile, keyFile, pool
}

func TestSentinel(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		servers := harness.Sentinels(t, shared.Program, 0, 1)
		c, err := redlatch.Open(t.Context(), servers.URL())
		require.NoError(t, err)
		defer c.Close()
		works(t, c, "orders")

		harness.Do(t, servers.Servers[0].Addr, documentedRights(t, "## Rights", "fair locks", "read-write locks", "semaphores", "count-down latches", "plain locks", "servers that sentinels watch")...)
		harness.Do(t, servers.Sentinels[0].Addr, documentedRights(t, "On sentinels")...)
		opt, err := redlatch.ParseURL(strings.Replace(servers.URL(), "//", "//app:password@", 1))
		require.NoError(t, err)
		opt.Sentinel.Username, opt.Sentinel.Password = "app", "password"
		restricted, err := redlatch.New(t.Context(), opt)
		require.NoError(t, err)
		defer restricted.Close()
		everythingWorks(t, harness.Conn(t, servers.Servers[0].Addr), restricted, c)
	})
}

func TestCluster(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range []pubsub.Mode{pubsub.Auto, pubsub.Sharded, pubsub.Plain} {
			t.Run(mode.String(), func(t *testing.T) {
				addrs := cluster.Addrs()
				c := harness.ClientAt(t, addrs, redlatch.WithPubSubMode(mode))
				other := harness.ClientAt(t, addrs, redlatch.WithPubSubMode(mode))
				// Enough names for every primary to have some.
				var wg sync.WaitGroup
				for i := range 12 {
					name := fmt.Sprint("orders-", i)
					for range 3 {
						works(t, c, name)
					}
					require.NoError(t, c.FencedLock(name+":fenced").Do(t.Context(), nothing))
					ctx := lock.WithOwner(t.Context(), c.NewOwner())
					require.NoError(t, c.Lock("{"+name+"}:named").Do(ctx, nothing))

					// A waiter elsewhere is woken by message: the lease is no help.
					h, err := c.Lock(name).Lock(t.Context(), lock.Lease(time.Hour))
					require.NoError(t, err)
					wg.Go(func() { assert.NoError(t, other.Lock(name).Do(context.Background(), nothing)) })
					harness.Eventually(t, 10*time.Second, "subscribed", func() bool { return other.PubSub().Subscribed == i+1 })
					begin := time.Now()
					require.NoError(t, h.Unlock(t.Context()))
					wg.Wait()
					require.Less(t, time.Since(begin), slack, "woken by the safety poll")
				}
				want := len(addrs)
				if mode == pubsub.Plain {
					want = 1
				}
				require.Equal(t, want, other.PubSub().Connections)
			})
		}
	})
}

func TestGuardRefusesTheHolderThatWasOvertaken(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var guard rlock.Guard
		late, err := c.FencedLock("orders").Lock(t.Context(), lock.Lease(100*time.Millisecond))
		require.NoError(t, err)
		<-late.Context().Done() // and its holder does not look
		require.NoError(t, c.FencedLock("orders").Do(t.Context(), nothing))
		h, err := c.FencedLock("orders").Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, guard.Check(h.Token()))
		require.ErrorIs(t, guard.Check(late.Token()), rlock.ErrStaleToken)
		require.NoError(t, h.Unlock(t.Context()))
		require.True(t, errors.Is(late.Unlock(t.Context()), lock.ErrLost))
	})
}

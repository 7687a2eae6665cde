package redlatch_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/rlock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

func nothing(context.Context) error { return nil }

const (
	// patience bounds what takes a moment on an idle machine.
	patience = 30 * time.Second
	// slack bounds the delay of something that is due now. It is less than the safety
	// poll.
	slack = 3500 * time.Millisecond
)

// checkLock acquires a lock twice at once, so that one caller waits and is woken. The
// client must have no other waiters.
func checkLock(t *testing.T, c *redlatch.Client, name string) {
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
		c, err := redlatch.Open(t.Context(), s.URL(), redlatch.WithNameMapper(func(name string) string { return "app:" + name }))
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.Ping(t.Context()))
		require.NoError(t, c.Lock("named").Do(t.Context(), func(context.Context) error {
			require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "app:named"))
			return nil
		}))
		_, err = redlatch.Open(t.Context(), s.URL(), nil)
		require.ErrorIs(t, err, lock.ErrInvalid)
		checkLock(t, c, "orders")
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
	closedAddr := closed.Addr().String()
	require.NoError(t, closed.Close())

	_, err = redlatch.Open(t.Context(), "redis://"+closedAddr)
	require.ErrorContains(t, err, closedAddr)

	// The context bounds the wait for a server that accepts connections and stays
	// silent.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = redlatch.Open(ctx, "redis://"+silent) // otherwise os.ErrDeadlineExceeded
	require.ErrorIs(t, err, context.DeadlineExceeded)

	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	_, err = redlatch.Open(ctx, "redis://"+closedAddr)
	require.ErrorIs(t, err, context.Canceled)

	// The abandoned attempt ends with its dialer's timeout.
	l.Close()
	harness.Eventually(t, 20*time.Second, "the dialer gives up", func() bool { return goleak.Find(before) == nil })
}

func TestOpenInvalidURLs(t *testing.T) {
	for url, says := range map[string]string{
		"":                       "it is empty",
		"localhost:6379":         "as in redis://user:password@host:port",
		":secret":                "no scheme",
		"me:secret@localhost":    "as in redis://user:password@host:port",
		"http://localhost":       "scheme",
		"redis://localhost/x":    "database",
		"redis://secret@[::1":    "malformed",
		"redis://me:se#cret@db":  "malformed",
		"redis://me:x/secret@db": "malformed",
		"redis://localhost?db=":  "database",

		"redis://:secret":              "malformed",
		"redis://:12#secret@db":        "malformed",
		"redis://:12?secret@db":        "malformed",
		"redis://:12?secret&x@db":      "malformed",
		"redis://:12/secret@db":        "malformed",
		"redis://me:secret@db/x":       "invalid database number",
		"redis://me:secret@db?foo=1":   `unknown parameter "foo"`,
		"redis://db?foo=secret":        `unknown parameter "foo"`,
		"redis://db?addr=b:1;addr=c:1": "semicolon",
		"redis://a:1,b:2":              "?addr=host2:port",
		"redis://a,b:2":                "?addr=host2:port",
		"redis://me:secret@a:1,b:2/0":  "?addr=host2:port",
		"redis://a:1?addr=b:2,c:3":     "?addr=host2:port",

		"redis://:12/secret":               "malformed",
		"redis://:12?secret":               "malformed",
		"redis://a?addr=me:secret@b:2":     "malformed",
		"redis://a?addr=b":                 "addr: a value is not host:port",
		"redis://a?addr=[::1]":             "addr: a value is not host:port",
		"unix:///a?addr=b:1":               "only address",
		"unix://var/run/redis.sock":        "unix:///var",
		"redis://a?write_timeout=-1s":      "negative",
		"redis://a?dial_timeout=-1s":       "negative",
		"redis://a?addr=":                  "parameter addr: the value is empty",
		"redis://a?master_set=":            "parameter master_set: the value is empty",
		"redis://a?client_name=b&db=1&db=": "parameter db: there is more than one value",
		"redis://a/1?db=2":                 "parameter db: there is more than one value",
		"redis://a?max_retries=3":          "parameter max_retries: must be 0",
		"redis://a?client_cache=1":         "parameter client_cache: must be 0",
		"redis://a?protocol=4":             "parameter protocol: must be 2 or 3",
		"redis://a?skip_verify=true":       "only for rediss and valkeys",
		"unix://?db=1":                     "address",

		"redis://a/secret":                          "invalid database number",
		"redis://a/secret/0":                        "invalid URL path",
		"redis://a?db=secret":                       "invalid database number",
		"redis://a?write_timeout=secret":            "invalid write timeout",
		"redis://a?addr=secret":                     "addr: a value is not host:port",
		"redis://a?sentinel_password=secret":        "only with master_set",
		"redis://a?master_set=m&sentinel_username=": "parameter sentinel_username: the value is empty",
	} {
		_, err := redlatch.Open(t.Context(), url)
		require.ErrorIs(t, err, lock.ErrInvalid, "%q", url)
		require.ErrorContains(t, err, says)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestParseURL(t *testing.T) {
	for _, url := range []string{
		"redis://", "valkeys://me:p,a@b?skip_verify", "unix:///a@b/c?db=1&client_name=me@here",
		"redis://a:1?addr=b:2&addr=c:3&master_set=m&max_retries=0&client_cache=0&protocol=2&dial_timeout=1s&write_timeout=1s",
	} {
		_, err := redlatch.ParseURL(url)
		require.NoError(t, err, url)
	}
}

func TestParseURLOfSentinels(t *testing.T) {
	opt, err := redlatch.ParseURL("rediss://app:password@a:1?addr=b:2&master_set=m&sentinel_username=watch&sentinel_password=%26word")
	require.NoError(t, err)
	require.Equal(t, []string{"a:1", "b:2"}, opt.InitAddress)
	require.Equal(t, "app password", opt.Username+" "+opt.Password)
	require.Equal(t, "watch &word", opt.Sentinel.Username+" "+opt.Sentinel.Password)
	require.NotNil(t, opt.Sentinel.TLSConfig)

	opt, err = redlatch.ParseURL("redis://a:1?master_set=m")
	require.NoError(t, err)
	require.Nil(t, opt.Sentinel.TLSConfig)
}

// A connection to a sentinel begins with a TLS handshake.
func TestConnectionsToSentinelsUseTLS(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	first := make(chan byte, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		b := make([]byte, 1)
		if _, err := conn.Read(b); err == nil {
			first <- b[0]
		}
	}()
	_, err = redlatch.Open(t.Context(), "rediss://"+l.Addr().String()+"?master_set=m&dial_timeout=200ms")
	require.Error(t, err)
	const handshake = 22 // RFC 8446, section 5.1
	require.Equal(t, byte(handshake), <-first)
}

// The parameters that redlatch knows are the words in the source of rueidis.ParseURL, and its own.
func TestURLParametersAreThoseOfRueidis(t *testing.T) {
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/redis/rueidis").Output()
	require.NoError(t, err)
	source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "url.go"))
	require.NoError(t, err)
	words := []string{"sentinel_password", "sentinel_username"}
	for _, word := range regexp.MustCompile(`"([a-z_]+)"`).FindAllStringSubmatch(string(source), -1) {
		switch word[1] {
		case "context", "fmt", "net", "strconv", "strings", "time": // imports
		case "redis", "rediss", "valkey", "valkeys", "unix", "localhost":
		default:
			words = append(words, word[1])
		}
	}
	slices.Sort(words)
	_, err = redlatch.ParseURL("redis://localhost?foo=1")
	require.ErrorContains(t, err, "there are "+strings.Join(slices.Compact(words), ", "))
}

// A server that does not use TLS replies with an error, or waits for the end of a line.
func TestTLSOnAServerWithoutIt(t *testing.T) {
	for _, reply := range []string{"-ERR unknown command\r\n", ""} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				_, _ = conn.Write([]byte(reply))
			}
		}()
		_, err = redlatch.Open(t.Context(), "rediss://"+l.Addr().String()+"?dial_timeout=200ms")
		require.ErrorIs(t, err, lock.ErrUnavailable)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "not use TLS on this port")
	}
}

func TestInvalidOptions(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for name, opt := range map[string]redlatch.Option{
			"no watchdog timeout":       redlatch.WithWatchdogTimeout(0),
			"negative watchdog timeout": redlatch.WithWatchdogTimeout(-time.Second),
			"tiny watchdog timeout":     redlatch.WithWatchdogTimeout(time.Millisecond),
			"huge watchdog timeout":     redlatch.WithWatchdogTimeout(lock.MaxLease + 1),
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
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}}, redlatch.WithWatchdogTimeout(lock.MaxLease))
		require.NoError(t, err)
		c.Close()
		_, err = redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, ReplicaOnly: true})
		require.ErrorIs(t, err, lock.ErrInvalid)
		for _, addrs := range [][]string{nil, {}, {""}, {s.Addr, ""}} {
			_, err = redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: addrs})
			require.ErrorIs(t, err, lock.ErrInvalid)
			require.ErrorContains(t, err, "address")
		}
		_, err = redlatch.Wrap(t.Context(), nil)
		require.ErrorIs(t, err, lock.ErrInvalid)
	})
}

func second[T any](_ T, err error) error { return err }

func TestStrictNames(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		prefix := redlatch.WithNameMapper(func(name string) string { return strings.TrimPrefix("app:"+name, "app:/") })
		c, lenient := harness.Client(t, s, redlatch.WithStrictNames(), prefix), harness.Client(t, s, prefix)
		for _, bad := range []string{"/{orders}", "/redisson_lock_queue:{orders}", "/{orders}:timeout", strings.Repeat("x", 509)} {
			for what, err := range map[string]error{
				"lock":      second(c.Lock(bad).TryLock(t.Context())),
				"fair":      second(c.FairLock(bad).TryLock(t.Context())),
				"write":     second(c.RWLock(bad).Write().TryLock(t.Context())),
				"semaphore": c.Semaphore(bad).TryAcquire(t.Context(), 1),
				"latch":     second(c.CountDownLatch(bad).Count(t.Context())),
				"election":  second(c.Election(bad).Leader(t.Context())),
				"once":      second(c.Once(bad).Done(t.Context(), "slot")),
				"multi":     second(c.MultiLock(c.Lock("a"), c.Lock(bad)).TryLock(t.Context())),
			} {
				require.ErrorIs(t, err, lock.ErrInvalid, "%s %.40q", what, bad)
				require.Less(t, len(err.Error()), 200, "%s %.40q", what, bad)
			}
			require.NoError(t, lenient.Lock(bad).Do(t.Context(), func(context.Context) error { return nil }))
		}
		for _, good := range []string{"orders", "{orders}", "/orders:timeout"} { // {orders} is app:{orders}
			require.NoError(t, c.Lock(good).Do(t.Context(), func(context.Context) error { return nil }), good)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// An uncontended lock costs two requests, whose scripts run only these commands.
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
			{"lock", of(ctx, c.Lock("a")), "evalsha 2: del 1, hexists 1, hlen 1, hset 1, pexpire 1, publish 1"},
			{"lock of a named owner", of(named, c.Lock("a")), "evalsha 2: del 1, hexists 1, hlen 1, hset 1, pexpire 1, publish 1"},
			{"re-entry", of(again, c.Lock("held")), "evalsha 0: "},
			{"fenced", of(ctx, c.FencedLock("a")), "evalsha 2: del 1, get 1, hexists 1, hlen 1, hset 1, incr 1, pexpire 1, publish 1"},
			{"spin", of(ctx, c.SpinLock("a")), "evalsha 2: del 1, hexists 1, hlen 1, hset 1, pexpire 1"},
			{"plain", of(ctx, c.PlainLock("a")), "evalsha 2: del 1, get 1, publish 1, set 1"},
			{"fair", of(ctx, c.FairLock("a")), "evalsha 2: del 1, exists 2, hexists 1, hset 1, pexpire 1"},
			{"read", of(ctx, c.RWLock("a").Read()), "evalsha 2: del 2, exists 1, hdel 1, hget 1, hlen 2, hmget 1, hset 1, pexpire 1, pttl 2, publish 1, set 1"},
			{"write", of(ctx, c.RWLock("a").Write()), "evalsha 2: del 2, hdel 1, hlen 2, hmget 2, hset 1, pexpire 1, publish 1"},
			{"multi", of(ctx, c.MultiLock(c.Lock("a"), c.Lock("b"))), "evalsha 2: del 1, exists 1, hexists 2, hset 2, pexpire 2, publish 2"},
			{"red", of(ctx, c.RedLock(c.Lock("a"))), "evalsha 2: del 1, hexists 1, hlen 1, hset 1, pexpire 1, publish 1"},
			{"semaphore", func() error {
				if err := numbered.Acquire(ctx, 1); err != nil {
					return err
				}
				return numbered.Release(ctx, 1)
			}, "evalsha 2: exists 2, hget 2, hset 2, incrby 2, publish 1, time 2"},
			{"permit semaphore", func() error {
				p, err := permits.Acquire(ctx)
				if err != nil {
					return err
				}
				return p.Release(ctx)
			}, "evalsha 2: exists 2, hget 2, hset 2, incrby 2, pttl 1, publish 1, time 2, zadd 1, zcount 1, zrem 1, zscore 1"},
			{"latch", func() error {
				if _, err := latch.TrySetCount(ctx, 1); err != nil {
					return err
				}
				return second(latch.CountDown(ctx))
			}, "evalsha 2: del 2, get 4, publish 2, set 4"},
		} {
			require.NoError(t, k.pair()) // loads the scripts
			harness.Idle(t, c)
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
				case "config", "ping", "evalsha": // connections send pings
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
		const waiters = 10 // less than the hand-off limit
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := c.Lock("orders")
		checkLock(t, c, "other") // loads the scripts
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
		waitForWaiters(t, conn, waiters, 1, c) // one attempt after the subscription
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

// waitForWaiters blocks until n callers of a client wait and have completed that many
// attempts since CONFIG RESETSTAT.
func waitForWaiters(t *testing.T, conn rueidis.Client, n, attempts int, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, patience, fmt.Sprint(n, " waiting callers after ", attempts, " attempts"), func() bool {
		return harness.Commands(t, conn)["evalsha"] >= attempts && harness.Waiting(n, c)
	})
}

func TestHandOffLimitAdmitsOtherProcesses(t *testing.T) {
	const limit, rounds = 4, 3
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
		for round := range rounds {
			for n := range 1 + limit {
				if round > 0 || n > 0 {
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

// With a limit of 0 no lock is passed on within the process, also when yielding to others has been in
// vain many times.
func TestHandOffLimitZero(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond
		r := record(t)
		c := s.Client(t, r.options(redlatch.WithHandOffLimit(0))...)
		red := redlatch.RedLock("red", []*redlatch.Client{c})
		var callers sync.WaitGroup
		for _, l := range []lock.Locker{c.Lock("orders"), c.FencedLock("fenced"), c.RWLock("rw").Write(), red} {
			for range 4 {
				callers.Go(func() {
					for range 25 {
						assert.NoError(t, l.Do(t.Context(), nothing))
					}
				})
			}
		}
		callers.Wait()
		require.Empty(t, r.measured()["redlatch.handoffs"])
	})
}

// renewed reports whether a hold is certain until the given time.
func renewed(h lock.Hold, until time.Time) bool { return time.Now().Add(h.Remaining()).After(until) }

// requireRenewed blocks until holds with that lease have been renewed several times.
func requireRenewed(t *testing.T, lease time.Duration, holds ...lock.Hold) {
	t.Helper()
	begin := time.Now()
	for _, h := range holds {
		harness.Eventually(t, 3*lease+slack, "renewals of "+h.Name(), func() bool {
			return renewed(h, begin.Add(2*lease)) || h.Context().Err() != nil
		})
		require.NoError(t, context.Cause(h.Context()), h.Name())
	}
}

// A finalizer detects a dropped hold, and the finalizers of a process run one after the
// other.
func TestBlockingLoggerDoesNotBlockFinalizers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		logging, blocked := make(chan struct{}, 1), make(chan struct{})
		unblock := sync.OnceFunc(func() { close(blocked) })
		defer unblock()
		log := slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
			logging <- struct{}{}
			<-blocked
			return len(b), nil
		}), nil))
		c := harness.Client(t, s, redlatch.WithLogger(log), redlatch.WithoutStartupChecks())
		_, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		harness.Eventually(t, 10*time.Second, "a log entry", func() bool {
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
		unblock()
		harness.Eventually(t, 10*time.Second, "the lock is free", func() bool {
			locked, err := c.Lock("orders").IsLocked(t.Context())
			return err == nil && !locked
		})
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestManyHoldsAreRenewedInBatches(t *testing.T) {
	const timeout, holds = 2 * time.Second, 500
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Conn(t, s.Addr)
		all := takeAll(t, c, names(holds))
		// Only the hold whose key is overwritten is lost.
		harness.Do(t, s.Addr, "SET", all[7].Name(), "precious")
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		requireLost(t, timeout+slack, all[7], lock.ReasonGone)
		all = slices.Delete(all, 7, 8)
		requireRenewed(t, timeout, all...)
		calls := harness.Commands(t, conn)
		require.GreaterOrEqual(t, calls["hexists"], 3*holds, "keys renewed")
		require.Greater(t, calls["hexists"]/calls["evalsha"], 4, "keys renewed by one script")
		unlockAll(t, all)
	})
}

func TestGuardRejectsStaleToken(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var guard rlock.Guard
		late, err := c.FencedLock("orders").Lock(t.Context(), lock.Lease(100*time.Millisecond))
		require.NoError(t, err)
		<-late.Context().Done() // its holder does not check
		require.NoError(t, c.FencedLock("orders").Do(t.Context(), nothing))
		h, err := c.FencedLock("orders").Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, guard.Check(h.Token()))
		require.ErrorIs(t, guard.Check(late.Token()), rlock.ErrStaleToken)
		require.NoError(t, h.Unlock(t.Context()))
		require.True(t, errors.Is(late.Unlock(t.Context()), lock.ErrLost))
	})
}

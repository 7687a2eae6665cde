package system_test

import (
	"context"
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
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

func nothing(context.Context) error { return nil }

const (
	// patience bounds what takes a moment on an idle machine.
	patience = 30 * time.Second
	// slack bounds the delay of something that is due now. It is less than the safety poll.
	slack = 3500 * time.Millisecond
)

// checkLock acquires a lock twice at once, so that one caller waits and is woken. The
// client must have no other waiters.
func checkLock(t *testing.T, c *redlatch.Client, name string) {
	t.Helper()
	h := mustLock(t, c.Lock(name))
	waiter := harness.StartLock(t, t.Context(), c.Lock(name))
	harness.Waits(t, 1, c)
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, waiter.Got().Unlock(t.Context()))
	require.False(t, harness.IsLocked(t, c.Lock(name)))
}

func second[T any](_ T, err error) error { return err }

func mustLock(t testing.TB, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	return h
}

// connect returns a client. The end of the test closes it.
func connect(t *testing.T, opt rueidis.ClientOption, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	c, err := redlatch.New(t.Context(), opt, opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// listen has serve talk to all who connect to the address that it returns.
func listen(t *testing.T, serve func(conn net.Conn)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serve(conn)
		}
	}()
	return l.Addr().String()
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

	// The context bounds the wait for a server that accepts connections and stays silent.
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
	first := make(chan byte, 1)
	addr := listen(t, func(conn net.Conn) {
		defer conn.Close()
		b := make([]byte, 1)
		if _, err := conn.Read(b); err == nil && len(first) == 0 {
			first <- b[0]
		}
	})
	_, err := redlatch.Open(t.Context(), "rediss://"+addr+"?master_set=m&dial_timeout=2s")
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
		addr := listen(t, func(conn net.Conn) {
			t.Cleanup(func() { conn.Close() })
			_, _ = conn.Write([]byte(reply))
		})
		_, err := redlatch.Open(t.Context(), "rediss://"+addr+"?dial_timeout=200ms")
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
			"negative turn":             redlatch.WithTurn(-1),
			"nil name mapper":           redlatch.WithNameMapper(nil),
			"nil logger":                redlatch.WithLogger(nil),
			"unknown mode":              redlatch.WithPubSubMode(99),
			"sharded without a cluster": redlatch.WithPubSubMode(pubsub.Sharded),
			"nil":                       nil,
		} {
			_, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}}, opt)
			require.ErrorIs(t, err, lock.ErrInvalid, name)
		}
		connect(t, rueidis.ClientOption{InitAddress: []string{s.Addr}}, redlatch.WithWatchdogTimeout(lock.MaxLease))
		_, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, ReplicaOnly: true})
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
				require.Less(t, len(err.Error()), 200+len(bad), "%s %.40q: the name once", what, bad)
			}
			require.NoError(t, lenient.Lock(bad).Do(t.Context(), nothing))
		}
		for _, good := range []string{"orders", "{orders}", "/orders:timeout"} { // {orders} is app:{orders}
			require.NoError(t, c.Lock(good).Do(t.Context(), nothing), good)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestHandOffIsOneCommand(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		checkLock(t, c, "other") // loads the scripts
		h := mustLock(t, c.Lock("orders"))
		var waiters []*harness.Call[lock.Hold]
		for range 3 { // less than a turn
			waiters = append(waiters, harness.StartLock(t, t.Context(), c.Lock("orders")))
			time.Sleep(time.Second)
		}
		s.Reset()
		for _, w := range waiters {
			require.NoError(t, h.Unlock(t.Context()))
			h = w.Got()
		}
		require.Equal(t, len(waiters), s.Calls("evalsha"))
		require.Zero(t, s.Calls("publish"))
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// With turns of no time no lock is passed on within the process, also when it was left to others in vain many
// times.
func TestTurnsOfNoTime(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond
		r := record(t)
		c := s.Client(t, r.options(redlatch.WithTurn(0))...)
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

// A finalizer detects a dropped hold, and the finalizers of a process run one after the other.
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
		c := harness.Client(t, s, redlatch.WithLogger(log), redlatch.WithoutStartupChecks(), redlatch.WithWatchdogTimeout(time.Second))
		mustLock(t, c.Lock("orders"))
		harness.Eventually(t, 10*time.Second, "a log entry", func() bool {
			runtime.GC()
			return len(logging) > 0
		})
		var other atomic.Bool
		func() { runtime.SetFinalizer(new([1]*int), func(*[1]*int) { other.Store(true) }) }()
		harness.Eventually(t, 10*time.Second, "another finalizer runs", func() bool {
			runtime.GC()
			return other.Load()
		})
		unblock()
		require.NoError(t, c.Lock("orders").Do(t.Context(), nothing, lock.Wait(10*time.Second)))
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

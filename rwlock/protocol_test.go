package rwlock_test

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rwlock"
)

// The tests of this file meet a server as TestLockstep does not know it: its keys are evicted or changed by
// hand, and it refuses commands.

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	clientID = "11111111-2222-3333-4444-555555555555"
	key      = "lock"
)

func owner(n int) lock.Owner {
	o, err := lock.NewOwner(clientID, uint64(n))
	if err != nil {
		panic(err)
	}
	return o
}

// lab has both protocols on a server.
type lab struct {
	t           *testing.T
	s           *testserver.Server
	conn        rueidis.Client
	sess        *session.Session
	read, write rwlock.Protocol
	ids         int
	began       time.Time
}

func newLab(t *testing.T, s *testserver.Server) *lab {
	t.Helper()
	return newLabOf(t, s, harness.Conn(t, s.Addr))
}

// newLabOf returns a lab with that connection.
func newLabOf(t *testing.T, s *testserver.Server, conn rueidis.Client) *lab {
	t.Helper()
	sess := session.New(session.Config{
		Client: conn, ID: clientID, WatchdogTimeout: 30 * time.Second, Turn: 10 * time.Millisecond,
		MapName: func(name string) string { return name },
	})
	t.Cleanup(sess.Close)
	l := &lab{t: t, s: s, conn: conn, sess: sess, began: time.Now()}
	l.read, l.write = rwlock.Protocols(sess)
	return l
}

// each runs a test in a lab on every server.
func each(t *testing.T, test func(l *lab)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) { test(newLab(t, s)) })
}

var kinds sync.Map // of claims, by their pointers

func newClaim(kind string, c engine.Claim) *engine.Claim {
	kinds.Store(&c, kind)
	return &c
}

func kindOf(c *engine.Claim) string {
	kind, _ := kinds.Load(c)
	name, _ := kind.(string)
	return name
}

// claim returns a claim with an id of its own.
func (l *lab) claim(p rwlock.Protocol, lease time.Duration) *engine.Claim {
	l.ids++
	return newClaim(p.Kind().Name, engine.Claim{Key: key, ID: owner(1000 + l.ids), Lease: lease})
}

// waiter returns the claim of a waiting writer.
func (l *lab) waiter() *engine.Claim {
	c := l.claim(l.write, time.Minute)
	c.Waits = true
	return c
}

func (l *lab) of(c *engine.Claim) rwlock.Protocol {
	if kindOf(c) == l.read.Kind().Name {
		return l.read
	}
	return l.write
}

func (l *lab) acquire(c *engine.Claim) engine.Answer {
	l.t.Helper()
	a, err := l.of(c).Acquire(l.t.Context(), c)
	require.NoError(l.t, err)
	return a
}

// take makes an attempt that must succeed, and returns its claim.
func (l *lab) take(c *engine.Claim) *engine.Claim {
	l.t.Helper()
	require.True(l.t, l.acquire(c).Acquired)
	return c
}

func (l *lab) release(c *engine.Claim) engine.Release {
	l.t.Helper()
	r, err := l.of(c).Release(l.t.Context(), c)
	require.NoError(l.t, err)
	return r
}

var (
	stillHeld = engine.Release{State: engine.StillHeld}
	notHeld   = engine.Release{}
	free      = engine.Release{State: engine.Free}
)

// renew renews claims of one kind for a lease.
func (l *lab) renew(lease time.Duration, claims ...*engine.Claim) []bool {
	l.t.Helper()
	batch := make([]watchdog.Subject, len(claims))
	for i, c := range claims {
		batch[i] = watchdog.Subject{Key: c.Key, Owner: c.ID.String()}
	}
	renewed := l.of(claims[0]).Renewer().Renew(l.t.Context(), [][]watchdog.Subject{batch}, lease, false)[0]
	require.NoError(l.t, renewed.Err)
	return renewed.Held
}

func (l *lab) hash() map[string]string {
	l.t.Helper()
	fields, err := l.conn.Do(l.t.Context(), l.conn.B().Hgetall().Key(key).Build()).AsStrMap()
	require.NoError(l.t, err)
	return fields
}

// ttl requires that a key has that time left, less the time since the start of the test.
func (l *lab) ttl(name string, want time.Duration) {
	l.t.Helper()
	const rounding = 200 * time.Millisecond // includes the time of a script
	got := time.Duration(harness.PTTL(l.t, l.s.Addr, name)) * time.Millisecond
	require.LessOrEqual(l.t, got, want+rounding, name)
	require.GreaterOrEqual(l.t, got, want-time.Since(l.began)-rounding, name)
}

func TestAReadHoldWhoseKeyWasEvicted(t *testing.T) {
	each(t, func(l *lab) {
		evict := func(c *engine.Claim) { harness.Do(l.t, l.s.Addr, "DEL", holdKeyOf(c.ID.String(), 1)) }
		var short []*engine.Claim
		for range 6 {
			short = append(short, l.take(l.claim(l.read, 20*time.Second)))
		}

		// It does not prolong the lock.
		long := l.take(l.claim(l.read, time.Minute))
		evict(long)
		require.Equal(l.t, stillHeld, l.release(long))
		l.ttl(key, 20*time.Second)

		// A renewal keeps it.
		evict(short[0])
		require.Equal(l.t, []bool{true}, l.renew(20*time.Second, short[0]))
		for _, c := range short[1:] {
			require.Equal(l.t, stillHeld, l.release(c))
		}

		// The last reader frees the lock, whatever its expiry.
		harness.Do(l.t, l.s.Addr, "PEXPIRE", key, "3600000")
		require.Equal(l.t, free, l.release(short[0]))
		harness.NothingLeft(l.t, l.s.Addr)
	})
}

// A lock that has lost its expiry gets one with the next release or renewal.
func TestALockWithoutExpiry(t *testing.T) {
	each(t, func(l *lab) {
		first, last := l.take(l.claim(l.read, time.Minute)), l.take(l.claim(l.read, 20*time.Second))
		harness.Do(l.t, l.s.Addr, "PERSIST", key)
		require.Equal(l.t, engine.Answer{Queued: true, FreeIn: rwlock.WriterPause, NoExpiry: true}, l.acquire(l.waiter()))
		require.Equal(l.t, stillHeld, l.release(first))
		l.ttl(key, 20*time.Second)
		require.Equal(l.t, free, l.release(last))

		w := l.take(l.claim(l.write, time.Minute))
		harness.Do(l.t, l.s.Addr, "PERSIST", key)
		require.Equal(l.t, engine.Answer{FreeIn: -time.Millisecond, NoExpiry: true}, l.acquire(l.waiter()))
		require.Equal(l.t, []bool{true}, l.renew(time.Minute, w))
		l.ttl(key, time.Minute)
	})
}

func TestABadKeyDoesNotFailTheBatch(t *testing.T) {
	each(t, func(l *lab) {
		var claims []*engine.Claim
		for _, name := range []string{"a", "b", "c"} {
			c := l.claim(l.read, 20*time.Second)
			c.Key = name
			claims = append(claims, l.take(c))
		}
		harness.Do(l.t, l.s.Addr, "SET", "b", "no lock")
		require.Equal(l.t, []bool{true, false, true}, l.renew(time.Minute, claims...))
		l.ttl("a", time.Minute)
		l.ttl("c", time.Minute)
	})
}

// The hash of a lock of another kind, and the field of a writer among readers, keep others out, and are no
// holds of this lock.
func TestAHoldOfAnotherKindIsNotTouched(t *testing.T) {
	each(t, func(l *lab) {
		o := owner(1)
		for _, fields := range [][]string{{o.String(), "1"}, {"mode", "read", owner(2).String(), "1", wire.WriteOwner(o), "1"}} {
			harness.Do(l.t, l.s.Addr, append([]string{"HSET", key}, fields...)...)
			harness.Do(l.t, l.s.Addr, "PEXPIRE", key, "20000")
			before := l.hash()
			for _, p := range []rwlock.Protocol{l.read, l.write} {
				if p == l.read && len(fields) > 2 {
					continue
				}
				for _, c := range []*engine.Claim{newClaim(p.Kind().Name, engine.Claim{Key: key, ID: o, Lease: time.Minute}), l.claim(p, time.Minute)} {
					a := l.acquire(c)
					require.False(l.t, a.Acquired)
					require.InDelta(l.t, 20*time.Second, a.FreeIn, float64(10*time.Second))
					require.Equal(l.t, notHeld, l.release(c))
				}
				forced, err := p.Force(l.t.Context(), key)
				require.NoError(l.t, err)
				require.False(l.t, forced)
				locked, err := p.IsLocked(l.t.Context(), key)
				require.NoError(l.t, err)
				require.False(l.t, locked)
			}
			require.Equal(l.t, before, l.hash())
			l.ttl(key, 20*time.Second)
			harness.Do(l.t, l.s.Addr, "DEL", key)
		}
	})
}

// A step that a user has no right to comes first or is undone: the attempt acquires nothing and
// blocks no readers.
func TestAnAttemptThatFailsLeavesNothing(t *testing.T) {
	each(t, func(l *lab) {
		t, s := l.t, l.s
		for _, right := range []string{"pexpire", "set", "hset", "sadd"} {
			harness.Do(t, s.Addr, "ACL", "SETUSER", right, "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
			t.Cleanup(func() { harness.Do(t, s.Addr, "ACL", "DELUSER", right) })
			conn, err := rueidis.NewClient(rueidis.ClientOption{
				InitAddress: []string{s.Addr}, Username: right, Password: "secret", DisableCache: true,
			})
			require.NoError(t, err)
			t.Cleanup(conn.Close)
			less := newLabOf(t, s, conn)
			writer, both := l.claim(l.write, time.Minute), l.claim(l.read, time.Minute)
			both.Writer = writer.ID
			for _, tt := range []struct {
				name   string
				before *engine.Claim
				claim  *engine.Claim
				needs  string
			}{
				{"reader", nil, l.claim(l.read, time.Minute), "pexpire set hset"},
				{"reader among others", l.claim(l.read, time.Minute), l.claim(l.read, time.Minute), "pexpire set hset"},
				{"reader that writes", writer, both, "pexpire set hset"},
				{"writer", nil, l.claim(l.write, time.Minute), "pexpire hset"},
				{"waiting writer", l.claim(l.read, time.Minute), l.waiter(), "pexpire sadd"},
			} {
				if !slices.Contains(strings.Fields(tt.needs), right) {
					continue
				}
				harness.Do(t, s.Addr, "FLUSHALL")
				if tt.before != nil {
					tt.before.Lease = 10 * time.Second
					l.take(tt.before)
				}
				before := l.dump()
				_, err := less.of(tt.claim).Acquire(t.Context(), tt.claim)
				require.Error(t, err, "%s without %s", tt.name, right)
				require.Equal(t, before, l.dump(), "%s without %s", tt.name, right)
				if tt.before != nil {
					l.ttl(key, 10*time.Second)
				}
			}
		}
	})
}

// A writer that leaves lets readers in even if it may not publish.
func TestLeavingDoesNotNeedTheRightToPublish(t *testing.T) {
	each(t, func(l *lab) {
		l.sess.Publish = "NONSENSE"
		l.take(l.claim(l.read, time.Minute))
		w := l.waiter()
		require.True(l.t, l.acquire(w).Queued)
		require.NoError(l.t, l.write.(engine.Positions).Leave(l.t.Context(), w))
		l.take(l.claim(l.read, time.Minute))
	})
}

// A replica refuses attempts when the lease is over, and does not say that the lock is taken, which it
// would say for as long as it has no primary that removes the lock.
func TestReplicaRefusesWhenTheLeaseIsOver(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		l := newLab(t, harness.Own(t, shared.Program))
		l.take(l.claim(l.write, 300*time.Millisecond))
		harness.Do(t, l.s.Addr, "REPLICAOF", "127.0.0.1", "1")
		for _, c := range []*engine.Claim{l.claim(l.read, time.Minute), l.claim(l.write, time.Minute), l.waiter()} {
			harness.Eventually(t, 10*time.Second, "the replica refuses", func() bool {
				_, err := l.of(c).Acquire(t.Context(), c)
				return err != nil && strings.Contains(err.Error(), "READONLY")
			})
		}
	})
}

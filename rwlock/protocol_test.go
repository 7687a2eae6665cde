package rwlock_test

import (
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rwlock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const clientID = "11111111-2222-3333-4444-555555555555"

func owner(n int) lock.Owner {
	o, err := lock.NewOwner(clientID, uint64(n))
	if err != nil {
		panic(err)
	}
	return o
}

// lab is both protocols on a server. What they publish is appended to a list of the
// channel's name instead of told to subscribers, so that every message can be seen.
type lab struct {
	t           *testing.T
	s           *testserver.Server
	conn        rueidis.Client
	read, write rwlock.Protocol
	owners      int
}

const key = "lock"

func newLab(t *testing.T, s *testserver.Server, configure ...func(*session.Session)) *lab {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	sess := session.New(session.Config{
		Client: conn, ID: clientID, WatchdogTimeout: 30 * time.Second, HandOffs: 16,
		MapName: func(name string) string { return name },
	})
	t.Cleanup(sess.Close)
	sess.Publish = "RPUSH"
	for _, f := range configure {
		f(sess)
	}
	l := &lab{t: t, s: s, conn: conn}
	l.read, l.write = rwlock.Protocols(sess)
	return l
}

// claim returns a claim of an owner of its own.
func (l *lab) claim(p rwlock.Protocol, lease time.Duration) *locking.Claim {
	l.owners++
	return &locking.Claim{Key: key, Kind: p.Traits().Kind, Owner: owner(1000 + l.owners), Lease: lease}
}

// named returns one more claim of a named owner.
func (l *lab) named(p rwlock.Protocol, o lock.Owner, lease time.Duration) *locking.Claim {
	return &locking.Claim{Key: key, Kind: p.Traits().Kind, Owner: o, Lease: lease, Ticket: wire.NewRequestID()}
}

func (l *lab) of(c *locking.Claim) rwlock.Protocol {
	if c.Kind == l.read.Traits().Kind {
		return l.read
	}
	return l.write
}

func (l *lab) acquire(c *locking.Claim) locking.Answer {
	l.t.Helper()
	a, err := l.of(c).Acquire(l.t.Context(), c)
	require.NoError(l.t, err)
	return a
}

// take makes an attempt that has to succeed, and returns its claim.
func (l *lab) take(c *locking.Claim) *locking.Claim {
	l.t.Helper()
	require.True(l.t, l.acquire(c).Acquired)
	return c
}

func (l *lab) release(c *locking.Claim) locking.Released {
	l.t.Helper()
	r, err := l.of(c).Release(l.t.Context(), c, false)
	require.NoError(l.t, err)
	return r
}

func (l *lab) handOff(from *locking.Claim, to ...*locking.Claim) locking.Passed {
	l.t.Helper()
	p, err := l.of(from).HandOff(l.t.Context(), from, to)
	require.NoError(l.t, err)
	return p
}

// renew renews holds of one kind for a lease.
func (l *lab) renew(lease time.Duration, claims ...*locking.Claim) []bool {
	l.t.Helper()
	batch := make([]*watchdog.Lease, len(claims))
	for i, c := range claims {
		batch[i] = &watchdog.Lease{Key: c.Key, Owner: c.Owner.String()}
		if c.Named() {
			batch[i].Ticket = wire.UnlockLatch(c.Key, c.Ticket)
		}
	}
	renewed := l.of(claims[0]).Renewer().Renew(l.t.Context(), [][]*watchdog.Lease{batch}, lease, false)
	require.Len(l.t, renewed, 1)
	require.NoError(l.t, renewed[0].Err)
	return renewed[0].Held
}

func (l *lab) leave(c *locking.Claim) {
	l.t.Helper()
	require.NoError(l.t, l.write.(locking.Placed).Leave(l.t.Context(), c))
}

// told returns the messages since it was called last.
func (l *lab) told() []string {
	l.t.Helper()
	told, err := l.conn.Do(l.t.Context(), l.conn.B().Lrange().Key(wire.RWChannel(key)).Start(0).Stop(-1).Build()).AsStrSlice()
	require.NoError(l.t, err)
	harness.Do(l.t, l.s.Addr, "DEL", wire.RWChannel(key))
	return told
}

func (l *lab) hash() map[string]string {
	l.t.Helper()
	fields, err := l.conn.Do(l.t.Context(), l.conn.B().Hgetall().Key(key).Build()).AsStrMap()
	require.NoError(l.t, err)
	return fields
}

func (l *lab) isLocked(p rwlock.Protocol) bool {
	l.t.Helper()
	locked, err := p.IsLocked(l.t.Context(), key)
	require.NoError(l.t, err)
	return locked
}

func (l *lab) force(p rwlock.Protocol) bool {
	l.t.Helper()
	held, err := p.Force(l.t.Context(), key)
	require.NoError(l.t, err)
	return held
}

// passes lets time pass for all keys.
func (l *lab) passes(d time.Duration) {
	l.t.Helper()
	require.NoError(l.t, passesScript.Exec(l.t.Context(), l.conn, nil, []string{wire.Millis(d)}).Error())
}

// passesScript brings every expiry nearer by ARGV[1] ms.
var passesScript = wire.NewScript(`
for _, key in ipairs(redis.call('KEYS', '*')) do
	local left = redis.call('PTTL', key)
	if left >= 0 then
		redis.call('PEXPIRE', key, left - ARGV[1]) -- which deletes it from 0 on
	end
end
return 0`)

// ttl requires that a key has that time left, less what the test has taken.
func (l *lab) ttl(name string, want time.Duration) {
	l.t.Helper()
	const slack = 3 * time.Second
	got := time.Duration(harness.PTTL(l.t, l.s.Addr, name)) * time.Millisecond
	require.LessOrEqual(l.t, got, want, name)
	require.Greater(l.t, got, want-slack, name)
}

func (l *lab) holdKey(c *locking.Claim, n int) string {
	return wire.ReadHoldTimeout(key, c.Owner, n)
}

func (l *lab) empty() {
	l.t.Helper()
	require.Equal(l.t, ":0", harness.Do(l.t, l.s.Addr, "DBSIZE"))
}

var (
	stillHeld = locking.Released{State: locking.StillHeld}
	notHeld   = locking.Released{}
	shared    = locking.Released{State: locking.Shared}
	free      = locking.Released{State: locking.Free, Told: 1}
	passed    = locking.Passed{Answer: locking.Answer{Acquired: true}}
)

// each runs a test in a lab on every server.
func each(t *testing.T, test func(l *lab)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) { test(newLab(t, s)) })
}

func TestReadersShareAndTheLastOneFreesTheLock(t *testing.T) {
	each(t, func(l *lab) {
		r1, r2 := l.take(l.claim(l.read, 10*time.Second)), l.take(l.claim(l.read, 20*time.Second))
		require.Equal(l.t, map[string]string{"mode": "read", r1.Owner.String(): "1", r2.Owner.String(): "1"}, l.hash())
		l.ttl(key, 20*time.Second)
		l.ttl(l.holdKey(r1, 1), 10*time.Second)
		l.ttl(l.holdKey(r2, 1), 20*time.Second)
		w := l.claim(l.write, 10*time.Second)
		require.False(l.t, l.acquire(w).Acquired)
		require.Equal(l.t, stillHeld, l.release(r1))
		require.False(l.t, l.acquire(w).Acquired)
		require.Empty(l.t, l.told())
		require.Equal(l.t, free, l.release(r2))
		require.Equal(l.t, []string{"0"}, l.told())
		l.empty()
		l.take(w)
		require.Equal(l.t, free, l.release(w))
		require.Equal(l.t, []string{"1"}, l.told())
		l.empty()
	})
}

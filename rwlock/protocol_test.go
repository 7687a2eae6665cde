package rwlock_test

import (
	"fmt"
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

func TestMain(m *testing.M) { harness.Main(m, workers) }

const clientID = "11111111-2222-3333-4444-555555555555"

func owner(n int) lock.Owner {
	o, err := lock.NewOwner(clientID, uint64(n))
	if err != nil {
		panic(err)
	}
	return o
}

// lab has both protocols on a server. They append their messages to a list with the name of
// the channel instead of publishing them, so that the test sees every message.
type lab struct {
	t           *testing.T
	s           *testserver.Server
	conn        rueidis.Client
	sess        *session.Session
	read, write rwlock.Protocol
	ids         int
	began       time.Time
}

const key = "lock"

func newLab(t *testing.T, s *testserver.Server) *lab {
	t.Helper()
	return newLabOf(t, s, harness.Conn(t, s.Addr), "RPUSH")
}

// newLabOf returns a lab with that connection and that command to publish.
func newLabOf(t *testing.T, s *testserver.Server, conn rueidis.Client, publish string) *lab {
	t.Helper()
	sess := session.New(session.Config{
		Client: conn, ID: clientID, WatchdogTimeout: 30 * time.Second, HandOffs: 16,
		MapName: func(name string) string { return name },
	})
	t.Cleanup(sess.Close)
	sess.Publish = publish
	l := &lab{t: t, s: s, conn: conn, sess: sess, began: time.Now()}
	l.read, l.write = rwlock.Protocols(sess)
	return l
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

// own returns the claim of a writer that also reads.
func (l *lab) own(w *engine.Claim, lease time.Duration) *engine.Claim {
	c := l.claim(l.read, lease)
	c.Writer = w.ID
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
	return once(r)
}

// once limits the number of receivers: the reply of RPUSH counts earlier messages too.
func once(r engine.Release) engine.Release {
	r.Receivers = min(r.Receivers, 1)
	return r
}

// renew renews claims of one kind for a lease.
func (l *lab) renew(lease time.Duration, claims ...*engine.Claim) []bool {
	l.t.Helper()
	batch := make([]watchdog.Subject, len(claims))
	for i, c := range claims {
		batch[i] = watchdog.Subject{Key: c.Key, Owner: c.ID.String()}
	}
	renewed := l.of(claims[0]).Renewer().Renew(l.t.Context(), [][]watchdog.Subject{batch}, lease, false)
	require.Len(l.t, renewed, 1)
	require.NoError(l.t, renewed[0].Err)
	return renewed[0].Held
}

func (l *lab) leave(c *engine.Claim) {
	l.t.Helper()
	require.NoError(l.t, l.write.(engine.Positions).Leave(l.t.Context(), c))
}

// messages returns the messages since the last call.
func (l *lab) messages() []string {
	l.t.Helper()
	messages, err := l.conn.Do(l.t.Context(), l.conn.B().Lrange().Key(wire.RWChannel(key)).Start(0).Stop(-1).Build()).AsStrSlice()
	require.NoError(l.t, err)
	harness.Do(l.t, l.s.Addr, "DEL", wire.RWChannel(key))
	return messages
}

func (l *lab) hash() map[string]string {
	l.t.Helper()
	fields, err := l.conn.Do(l.t.Context(), l.conn.B().Hgetall().Key(key).Build()).AsStrMap()
	require.NoError(l.t, err)
	return fields
}

// has requires that the lock is in the mode, and that these claims stand and no others.
func (l *lab) has(mode string, claims ...*engine.Claim) {
	l.t.Helper()
	want := map[string]string{"mode": mode}
	for _, c := range claims {
		want[fieldOf(c)] = "1"
	}
	require.Equal(l.t, want, l.hash())
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

// ttl requires that a key has that time left, less the time since the start of the test.
func (l *lab) ttl(name string, want time.Duration) {
	l.t.Helper()
	l.about(want, time.Duration(harness.PTTL(l.t, l.s.Addr, name))*time.Millisecond, name)
}

// about requires that a duration is the wanted one, less the time since the start of the test.
func (l *lab) about(want, got time.Duration, what string) {
	l.t.Helper()
	const rounding = 200 * time.Millisecond // includes the time of a script
	require.LessOrEqual(l.t, got, want+rounding, what)
	require.GreaterOrEqual(l.t, got, want-time.Since(l.began)-rounding, what)
}

func (l *lab) holdKey(c *engine.Claim) string { return wire.ReadHoldTimeout(key, c.ID.String(), 1) }

func (l *lab) empty() {
	l.t.Helper()
	require.Equal(l.t, ":0", harness.Do(l.t, l.s.Addr, "DBSIZE"))
}

var (
	stillHeld = engine.Release{State: engine.StillHeld}
	notHeld   = engine.Release{}
	free      = engine.Release{State: engine.Free, Receivers: 1}
)

// each runs a test in a lab on every server.
func each(t *testing.T, test func(l *lab)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) { test(newLab(t, s)) })
}

func TestReadersShareAndTheLastOneFreesTheLock(t *testing.T) {
	each(t, func(l *lab) {
		var readers []*engine.Claim
		for n := range 3 {
			lease := time.Duration(n+1) * 20 * time.Second
			readers = append(readers, l.take(l.claim(l.read, lease)))
			l.has("read", readers...)
			l.ttl(key, lease)
			l.ttl(l.holdKey(readers[n]), lease)
		}
		w := l.claim(l.write, 10*time.Second)
		for n, next := range []time.Duration{60 * time.Second, 20 * time.Second} { // in the order 1, 2, 0
			require.False(l.t, l.acquire(w).Acquired)
			require.Equal(l.t, stillHeld, l.release(readers[n+1]))
			l.ttl(key, next)
			l.ttl(l.holdKey(readers[0]), 20*time.Second)
		}
		l.has("read", readers[0])
		require.Empty(l.t, l.messages())
		require.Equal(l.t, free, l.release(readers[0]))
		require.Equal(l.t, []string{"0"}, l.messages())
		l.empty()
		l.take(w)
		l.has("write", w)
		l.ttl(key, 10*time.Second)
		require.Equal(l.t, free, l.release(w))
		require.Equal(l.t, []string{"1"}, l.messages())
		l.empty()
	})
}

func TestRequestsForAClaimThatDoesNotStand(t *testing.T) {
	each(t, func(l *lab) {
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			for _, other := range []rwlock.Protocol{nil, l.read, l.write} {
				harness.Do(l.t, l.s.Addr, "FLUSHALL")
				claims := []*engine.Claim{l.claim(p, time.Minute)}
				if other != nil {
					holder := l.take(l.claim(other, 10*time.Second))
					if other != p { // it is held on the other side
						same := l.claim(p, time.Minute)
						same.ID = holder.ID
						claims = append(claims, same)
					}
				}
				before := l.hash()
				for _, c := range claims {
					require.Equal(l.t, notHeld, l.release(c))
					held, err := p.Extend(l.t.Context(), c, time.Minute)
					require.NoError(l.t, err)
					require.False(l.t, held)
					require.Equal(l.t, []bool{false}, l.renew(time.Minute, c))
				}
				require.Equal(l.t, before, l.hash())
				require.Empty(l.t, l.messages(), "such a release wakes nobody")
			}
		}
	})
}

func TestAWriterExcludesOthers(t *testing.T) {
	each(t, func(l *lab) {
		w := l.take(l.claim(l.write, 20*time.Second))
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			c := l.claim(p, time.Minute)
			for _, waits := range []bool{false, true} {
				c.Waits = waits
				a := l.acquire(c)
				require.Equal(l.t, engine.Answer{FreeIn: a.FreeIn}, a)
				l.about(20*time.Second, a.FreeIn, "the wait")
			}
		}
		l.has("write", w)
		require.Equal(l.t, free, l.release(w))
	})
}

func TestAWriterGoesOnAsAReader(t *testing.T) {
	each(t, func(l *lab) {
		w := l.take(l.claim(l.write, time.Minute))
		r := l.take(l.own(w, 20*time.Second))
		l.has("write", w, r)
		require.Equal(l.t, free, l.release(w))
		require.Equal(l.t, []string{"1"}, l.messages(), "readers elsewhere can enter")
		l.has("read", r)
		l.ttl(key, 20*time.Second)
		require.False(l.t, l.acquire(l.claim(l.write, time.Minute)).Acquired)
		other := l.take(l.claim(l.read, 10*time.Second))
		require.Equal(l.t, stillHeld, l.release(other))
		require.Equal(l.t, free, l.release(r))
		l.take(l.claim(l.write, time.Minute))
	})
}

func TestAReadHoldThatIsOverEndsWithTheWriteHold(t *testing.T) {
	each(t, func(l *lab) {
		w := l.take(l.claim(l.write, time.Minute))
		l.take(l.own(w, 10*time.Second))
		l.passes(11 * time.Second)
		require.Equal(l.t, free, l.release(w))
		require.Empty(l.t, l.hash())
	})
}

func TestTheLockFallsBackToTheHoldsThatStay(t *testing.T) {
	each(t, func(l *lab) {
		first := l.take(l.claim(l.read, 40*time.Second))
		l.passes(30 * time.Second)
		later := l.take(l.claim(l.read, 40*time.Second))
		l.ttl(key, 40*time.Second)
		require.Equal(l.t, stillHeld, l.release(later))
		l.ttl(key, 10*time.Second)
		l.ttl(l.holdKey(first), 10*time.Second)
		w := l.claim(l.write, time.Minute)
		a := l.acquire(w)
		require.False(l.t, a.Acquired)
		l.about(10*time.Second, a.FreeIn, "the wait")
		l.passes(10 * time.Second)
		l.take(w)
	})
}

// A writer that also reads ends either hold first. The other hold has its time.
func TestAWriterEndsEitherHoldFirst(t *testing.T) {
	const short, long = 20 * time.Second, 60 * time.Second
	type row struct{ write, read time.Duration }
	harness.EachOf(t, []row{{long, short}, {short, long}}, func(r row) string { return fmt.Sprint(r.write, " ", r.read) }, func(t *testing.T, s *testserver.Server, r row) {
		l := newLab(t, s)
		w := l.take(l.claim(l.write, r.write))
		own := l.take(l.own(w, r.read))
		require.Equal(t, stillHeld, l.release(own))
		l.has("write", w)
		l.ttl(key, long) // as long as it was
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", l.holdKey(own)))

		l.take(own)
		require.Equal(t, free, l.release(w))
		l.has("read", own)
		l.ttl(key, r.read)
		l.ttl(l.holdKey(own), r.read)
	})
}

func TestAWriteHoldIsNotCutShort(t *testing.T) {
	each(t, func(l *lab) {
		w := l.take(l.claim(l.write, time.Minute))
		r := l.take(l.own(w, 10*time.Second))
		l.ttl(key, time.Minute)
		for _, lease := range []time.Duration{2 * time.Minute, time.Minute} {
			held, err := l.write.Extend(l.t.Context(), w, lease)
			require.NoError(l.t, err)
			require.True(l.t, held)
			l.ttl(key, 2*time.Minute)
		}
		require.Equal(l.t, stillHeld, l.release(r))
		l.ttl(key, 2*time.Minute)
		require.Equal(l.t, free, l.release(w))
	})
}

func TestReadersThatDiedGoWithTheLastThatLives(t *testing.T) {
	each(t, func(l *lab) {
		l.take(l.claim(l.read, 10*time.Second))
		l.take(l.claim(l.read, 10*time.Second))
		last := l.take(l.claim(l.read, time.Minute))
		l.passes(20 * time.Second)
		require.Len(l.t, l.hash(), 4)
		require.Equal(l.t, free, l.release(last))
		require.Equal(l.t, []string{"0"}, l.messages())
		l.empty()
	})
}

func TestAReaderWhoseKeyWasEvictedDoesNotProlongTheLock(t *testing.T) {
	each(t, func(l *lab) {
		var short []*engine.Claim
		for range 6 {
			short = append(short, l.take(l.claim(l.read, 20*time.Second)))
		}
		long := l.take(l.claim(l.read, time.Minute))
		harness.Do(l.t, l.s.Addr, "DEL", l.holdKey(long))
		require.Equal(l.t, stillHeld, l.release(long))
		l.ttl(key, 20*time.Second)
		for _, c := range short[1:] {
			require.Equal(l.t, stillHeld, l.release(c))
		}
		// The last reader frees the lock, whatever its expiry.
		harness.Do(l.t, l.s.Addr, "PEXPIRE", key, "3600000")
		require.Equal(l.t, free, l.release(short[0]))
		l.messages()
		l.empty()
	})
}

func TestALockWithoutExpiry(t *testing.T) {
	each(t, func(l *lab) {
		r := l.take(l.claim(l.read, time.Minute))
		other := l.take(l.claim(l.read, 20*time.Second))
		harness.Do(l.t, l.s.Addr, "PERSIST", key)
		require.Equal(l.t, engine.Answer{FreeIn: unknownTime, NoExpiry: true}, l.acquire(l.claim(l.write, time.Minute)))
		require.Equal(l.t, engine.Answer{Queued: true, FreeIn: rwlock.WriterPause, NoExpiry: true}, l.acquire(l.waiter()))
		require.Equal(l.t, stillHeld, l.release(r))
		l.ttl(key, 20*time.Second)
		require.Equal(l.t, free, l.release(other))

		w := l.take(l.claim(l.write, time.Minute))
		harness.Do(l.t, l.s.Addr, "PERSIST", key)
		for _, c := range []*engine.Claim{l.claim(l.read, time.Minute), l.waiter()} {
			require.Equal(l.t, engine.Answer{FreeIn: unknownTime, NoExpiry: true}, l.acquire(c))
		}
		require.Equal(l.t, []bool{true}, l.renew(time.Minute, w))
		l.ttl(key, time.Minute)
	})
}

func TestReadAndWriteClaimsAreRenewedSeparately(t *testing.T) {
	each(t, func(l *lab) {
		w := l.take(l.claim(l.write, 30*time.Second))
		r := l.take(l.own(w, 30*time.Second))
		for range 3 {
			l.passes(10 * time.Second)
			require.Equal(l.t, []bool{true}, l.renew(30*time.Second, w))
			require.Equal(l.t, []bool{true}, l.renew(30*time.Second, r))
		}
		l.ttl(key, 30*time.Second)
		require.Equal(l.t, free, l.release(w))
		for range 3 {
			l.passes(10 * time.Second)
			require.Equal(l.t, []bool{false}, l.renew(30*time.Second, w))
			require.Equal(l.t, []bool{true}, l.renew(30*time.Second, r))
		}
		l.ttl(key, 30*time.Second)
		l.ttl(l.holdKey(r), 30*time.Second)
		require.Equal(l.t, free, l.release(r))
	})
}

func TestRenewalCutsNothingShort(t *testing.T) {
	each(t, func(l *lab) {
		long, short := l.take(l.claim(l.read, time.Hour)), l.take(l.claim(l.read, 10*time.Second))
		require.Equal(l.t, []bool{true, true}, l.renew(30*time.Second, long, short))
		l.ttl(l.holdKey(long), time.Hour)
		l.ttl(l.holdKey(short), 30*time.Second)
		l.ttl(key, time.Hour)
		for _, c := range []*engine.Claim{long, short} {
			held, err := l.read.Extend(l.t.Context(), c, 20*time.Second)
			require.NoError(l.t, err)
			require.True(l.t, held)
		}
		l.ttl(l.holdKey(long), time.Hour)
		l.ttl(l.holdKey(short), 30*time.Second)
		l.ttl(key, time.Hour)
	})
}

func TestARenewalKeepsAReaderWhoseKeyWasEvicted(t *testing.T) {
	each(t, func(l *lab) {
		kept, other := l.take(l.claim(l.read, 20*time.Second)), l.take(l.claim(l.read, 20*time.Second))
		harness.Do(l.t, l.s.Addr, "DEL", l.holdKey(kept))
		require.Equal(l.t, []bool{true}, l.renew(20*time.Second, kept))
		require.Equal(l.t, stillHeld, l.release(other))
		l.has("read", kept)
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

func TestAWaitingWriterBlocksNewReaders(t *testing.T) {
	each(t, func(l *lab) {
		r := l.take(l.claim(l.read, 20*time.Second))
		once := l.claim(l.write, time.Minute)
		require.False(l.t, l.acquire(once).Queued, "it does not wait")
		w, w2 := l.waiter(), l.waiter()
		require.Equal(l.t, engine.Answer{Queued: true, FreeIn: rwlock.WriterPause}, l.acquire(w))
		l.ttl(wire.WriterWaits(key), rwlock.WriterLife)
		a := l.acquire(l.claim(l.read, time.Minute))
		require.False(l.t, a.Acquired)
		l.about(rwlock.WriterLife, a.FreeIn, "the wait")
		l.take(r) // delivered again

		require.True(l.t, l.acquire(w2).Queued)
		l.leave(w)
		require.Empty(l.t, l.messages(), "another waits")
		require.False(l.t, l.acquire(l.claim(l.read, time.Minute)).Acquired)
		require.Equal(l.t, free, l.release(r))
		l.messages()
		require.False(l.t, l.acquire(l.claim(l.read, time.Minute)).Acquired, "the message was for the writer")
		l.leave(w2)
		require.Equal(l.t, []string{"1"}, l.messages())
		l.leave(w2)
		require.Empty(l.t, l.messages())
		reader := l.take(l.claim(l.read, time.Minute))

		require.True(l.t, l.acquire(w).Queued)
		l.release(reader)
		l.take(w)
		require.Equal(l.t, ":0", harness.Do(l.t, l.s.Addr, "EXISTS", wire.WriterWaits(key)), "it no longer waits")
	})
}

func TestAWriterThatDiedLetsReadersIn(t *testing.T) {
	each(t, func(l *lab) {
		l.take(l.claim(l.read, time.Minute))
		w, dead := l.waiter(), l.waiter()
		l.acquire(dead)
		for range 5 {
			l.passes(rwlock.WriterPause)
			require.True(l.t, l.acquire(w).Queued)
			require.False(l.t, l.acquire(l.claim(l.read, time.Minute)).Acquired)
		}
		l.passes(rwlock.WriterLife)
		l.take(l.claim(l.read, time.Minute))
	})
}

func TestTheReleaseOfAWaitingWriterLetsReadersIn(t *testing.T) {
	each(t, func(l *lab) {
		l.take(l.claim(l.read, time.Minute))
		w := l.waiter()
		require.True(l.t, l.acquire(w).Queued)
		require.Equal(l.t, notHeld, l.release(w))
		require.Equal(l.t, []string{"1"}, l.messages())
		l.take(l.claim(l.read, time.Minute))
	})
}

func TestAnAttemptThatIsRepeated(t *testing.T) {
	each(t, func(l *lab) {
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			c := l.take(l.claim(p, 20*time.Second))
			l.passes(10 * time.Second)
			l.take(c)
			require.Len(l.t, l.hash(), 2)
			l.ttl(key, 20*time.Second)
			held, err := p.Extend(l.t.Context(), c, time.Minute)
			require.NoError(l.t, err)
			require.True(l.t, held)
			l.take(c) // late
			l.ttl(key, time.Minute)
			require.Equal(l.t, free, l.release(c))
			require.Equal(l.t, notHeld, l.release(c))
			require.Empty(l.t, l.hash())
		}
	})
}

func TestAGroupOfReadersEntersTogether(t *testing.T) {
	each(t, func(l *lab) {
		w := l.take(l.claim(l.write, 20*time.Second))
		var claims []*engine.Claim
		for n := range 100 {
			claims = append(claims, l.claim(l.read, time.Duration(129-n)*time.Second))
		}
		all := func() []engine.Answer {
			answers, err := l.read.(engine.Grouped).AcquireAll(l.t.Context(), claims)
			require.NoError(l.t, err)
			require.Len(l.t, answers, len(claims))
			return answers
		}
		for _, a := range all() {
			require.False(l.t, a.Acquired)
			l.about(20*time.Second, a.FreeIn, "the wait")
		}
		l.release(w)
		for range 2 { // and again, delivered twice
			for _, a := range all() {
				require.True(l.t, a.Acquired)
			}
			require.Len(l.t, l.hash(), 101)
			l.ttl(key, 129*time.Second)
			l.ttl(l.holdKey(claims[99]), 30*time.Second)
		}
		l.messages()
		for _, c := range claims[:99] {
			require.Equal(l.t, stillHeld, l.release(c))
		}
		l.ttl(key, 30*time.Second)
		require.Equal(l.t, free, l.release(claims[99]))
		l.messages()
		l.empty()
	})
}

func TestAWriteHoldInReadModeIsNone(t *testing.T) {
	each(t, func(l *lab) {
		r, w := l.take(l.claim(l.read, time.Minute)), l.claim(l.write, time.Minute)
		harness.Do(l.t, l.s.Addr, "HSET", key, wire.WriteOwner(w.ID), "1")
		before := l.hash()
		require.Equal(l.t, notHeld, l.release(w))
		require.False(l.t, l.acquire(w).Acquired)
		require.Equal(l.t, before, l.hash())
		l.has("read", r, w)
	})
}

func TestALockOfAnotherKindIsNotTouched(t *testing.T) {
	each(t, func(l *lab) {
		o := owner(1)
		harness.Do(l.t, l.s.Addr, "HSET", key, o.String(), "1")
		harness.Do(l.t, l.s.Addr, "PEXPIRE", key, "20000")
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			same := l.claim(p, time.Minute)
			same.ID = o
			for _, c := range []*engine.Claim{same, l.claim(p, time.Minute)} {
				c.Waits = true
				a := l.acquire(c)
				require.Equal(l.t, engine.Answer{FreeIn: a.FreeIn}, a)
				l.about(20*time.Second, a.FreeIn, "the wait")
				require.Equal(l.t, notHeld, l.release(c))
				require.Equal(l.t, []bool{false}, l.renew(time.Minute, l.own(same, time.Minute)))
			}
			require.False(l.t, l.force(p))
			require.False(l.t, l.isLocked(p))
		}
		require.Equal(l.t, map[string]string{o.String(): "1"}, l.hash())
		l.ttl(key, 20*time.Second)
	})
}

func TestAKeyThatIsNoLockIsAnError(t *testing.T) {
	each(t, func(l *lab) {
		harness.Do(l.t, l.s.Addr, "SET", key, "something")
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			c := l.claim(p, time.Minute)
			_, err := p.Acquire(l.t.Context(), c)
			require.ErrorContains(l.t, err, "WRONGTYPE")
			_, err = p.Release(l.t.Context(), c)
			require.ErrorContains(l.t, err, "WRONGTYPE")
			_, err = p.Extend(l.t.Context(), c, time.Second)
			require.ErrorContains(l.t, err, "WRONGTYPE")
			_, err = p.Force(l.t.Context(), key)
			require.ErrorContains(l.t, err, "WRONGTYPE")
			_, err = p.IsLocked(l.t.Context(), key)
			require.ErrorContains(l.t, err, "WRONGTYPE")
		}
		require.Equal(l.t, ":1", harness.Do(l.t, l.s.Addr, "DBSIZE"))
		require.Equal(l.t, "$9", harness.Do(l.t, l.s.Addr, "GET", key))
	})
}

// A step that a user has no right to comes first or is undone: the attempt acquires nothing and
// blocks no readers.
func TestAnAttemptThatFailsLeavesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := newLab(t, s)
		for _, right := range []string{"pexpire", "set", "hset", "sadd"} {
			harness.Do(t, s.Addr, "ACL", "SETUSER", right, "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
			t.Cleanup(func() { harness.Do(t, s.Addr, "ACL", "DELUSER", right) })
			conn, err := rueidis.NewClient(rueidis.ClientOption{
				InitAddress: []string{s.Addr}, Username: right, Password: "secret", DisableCache: true})
			require.NoError(t, err)
			t.Cleanup(conn.Close)
			less := newLabOf(t, s, conn, "RPUSH")
			writer := l.claim(l.write, time.Minute)
			for _, tt := range []struct {
				name   string
				before *engine.Claim
				claim  *engine.Claim
				needs  string
			}{
				{"reader", nil, l.claim(l.read, time.Minute), "pexpire set hset"},
				{"reader among others", l.claim(l.read, time.Minute), l.claim(l.read, time.Minute), "pexpire set hset"},
				{"reader that writes", writer, l.own(writer, time.Minute), "pexpire set hset"},
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
				keys, hash := harness.Do(t, s.Addr, "DBSIZE"), l.hash()
				_, err := less.of(tt.claim).Acquire(t.Context(), tt.claim)
				require.Error(t, err, "%s without %s", tt.name, right)
				require.Equal(t, keys, harness.Do(t, s.Addr, "DBSIZE"), "%s without %s", tt.name, right)
				require.Equal(t, hash, l.hash(), "%s without %s", tt.name, right)
				if tt.before != nil {
					l.ttl(key, 10*time.Second)
				}
			}
		}
	})
}

func TestOutOfMemoryTakesNothingAndReleases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, group := range []bool{false, true} {
			harness.Do(t, s.Addr, "FLUSHALL")
			l := newLab(t, s)
			r, other := l.take(l.claim(l.read, 10*time.Second)), l.take(l.claim(l.read, 10*time.Second))
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory-policy", "noeviction")
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")
			t.Cleanup(func() { harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0") })
			keys := harness.Do(t, s.Addr, "DBSIZE")
			for _, c := range []*engine.Claim{l.claim(l.read, time.Minute), l.waiter()} {
				_, err := l.of(c).Acquire(t.Context(), c)
				require.ErrorContains(t, err, "OOM")
			}
			if group {
				_, err := l.read.(engine.Grouped).AcquireAll(t.Context(), []*engine.Claim{l.claim(l.read, time.Minute), l.claim(l.read, time.Minute)})
				require.ErrorContains(t, err, "OOM")
			}
			require.Equal(t, keys, harness.Do(t, s.Addr, "DBSIZE"))
			require.Equal(t, []bool{true, true}, l.renew(time.Minute, r, other))
			held, err := l.read.Extend(t.Context(), r, 2*time.Minute)
			require.NoError(t, err)
			require.True(t, held)
			require.Equal(t, stillHeld, l.release(r))
			require.Equal(t, engine.Free, l.release(other).State)
			_, err = l.write.Acquire(t.Context(), l.claim(l.write, time.Minute))
			require.ErrorContains(t, err, "OOM")
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
			w := l.take(l.claim(l.write, time.Minute))
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")
			require.Equal(t, engine.Free, l.release(w).State)
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		}
	})
}

// A replica refuses attempts when the lease is over, and does not say that the lock is taken, which it
// would say for as long as it has no primary that removes the lock.
func TestReplicaRefusesWhenTheLeaseIsOver(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		l := newLab(t, s)
		l.take(l.claim(l.write, 300*time.Millisecond))
		harness.Do(t, s.Addr, "REPLICAOF", "127.0.0.1", "1")
		for _, c := range []*engine.Claim{l.claim(l.read, time.Minute), l.claim(l.write, time.Minute), l.waiter()} {
			harness.Eventually(t, 10*time.Second, "the replica refuses", func() bool {
				_, err := l.of(c).Acquire(t.Context(), c)
				return err != nil && strings.Contains(err.Error(), "READONLY")
			})
		}
	})
}

func TestAReleaseDoesNotNeedTheRightToPublish(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := newLabOf(t, s, harness.Conn(t, s.Addr), "NONSENSE")
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			c := l.take(l.claim(p, time.Minute))
			require.Equal(t, engine.Release{State: engine.Free}, l.release(c))
			l.empty()
		}
		l.take(l.claim(l.read, time.Minute))
		w := l.waiter()
		l.acquire(w)
		l.leave(w)
		l.take(l.claim(l.read, time.Minute))
		require.True(t, l.force(l.read))
		l.empty()
	})
}

func TestReceiversAreNotCountedIfSomeAreUnknown(t *testing.T) {
	each(t, func(l *lab) {
		l.sess.PartialCounts = true
		for _, p := range []rwlock.Protocol{l.read, l.write} {
			c := l.take(l.claim(p, time.Minute))
			require.Equal(l.t, engine.Release{State: engine.Free, Receivers: -1}, l.release(c))
		}
	})
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

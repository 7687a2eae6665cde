package fairlock_test

import (
	"context"
	_ "embed"
	"fmt"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

var (
	//go:embed testdata/java_acquire.lua
	javaAcquires string
	//go:embed testdata/java_release.lua
	javaReleases string
	//go:embed testdata/java_leave.lua
	javaLeaves string

	peerAcquire = wire.NewScript(javaAcquires)
	peerRelease = wire.NewScript(javaReleases)
	peerLeave   = wire.NewScript(javaLeaves)
)

// java is a Java client that uses the lock "orders".
type java struct {
	t     testing.TB
	conn  rueidis.Client
	owner string
	wait  time.Duration // of its call, as its arithmetic uses it
	ahead time.Duration // its clock
}

func newJava(t testing.TB, conn rueidis.Client, number int, wait time.Duration) *java {
	return &java{t: t, conn: conn, owner: fmt.Sprintf("%s:%d", javaID, number), wait: wait}
}

func (j *java) exec(script *wire.Script, args ...string) rueidis.RedisResult {
	return script.Exec(context.Background(), j.conn, []string{orders, wire.FairQueue(orders), wire.FairTimeouts(orders)}, args)
}

func (j *java) now() string { return fmt.Sprint(time.Now().Add(j.ahead).UnixMilli()) }

// poll acquires the lock if the client is first. Otherwise it enters the queue, and returns
// how long Redisson would sleep.
func (j *java) poll(lease time.Duration) (acquired bool, ttl time.Duration) {
	j.t.Helper()
	reply, err := j.exec(peerAcquire, wire.Millis(lease), j.owner, wire.Millis(j.wait), j.now(), "1").AsInt64()
	if rueidis.IsRedisNil(err) {
		return true, 0
	}
	require.NoError(j.t, err)
	return false, time.Duration(reply) * time.Millisecond
}

func (j *java) acquire() bool {
	j.t.Helper()
	acquired, _ := j.poll(lease)
	return acquired
}

func (j *java) release() {
	j.t.Helper()
	n, err := j.exec(peerRelease, wire.Millis(lease), j.owner, j.now(), wire.LockChannel(orders)).AsInt64()
	require.NoError(j.t, err)
	require.EqualValues(j.t, 1, n)
}

func (j *java) leave() {
	j.t.Helper()
	require.True(j.t, rueidis.IsRedisNil(j.exec(peerLeave, j.owner, wire.Millis(j.wait)).Error()))
}

// timeless is a protocol in virtual time, with Java clients.
type timeless struct {
	*world
	s    *harness.VirtualServer
	conn rueidis.Client
	wait time.Duration
}

func inVirtualTime(t *testing.T, wait time.Duration, test func(t *testing.T, w *timeless)) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		conn := s.Conn(t)
		sess := newSession(t, conn, wait)
		test(t, &timeless{&world{t, sess, fairlock.NewProtocol(sess, orders), ""}, s, conn, wait})
	})
}

// waiter is a client that wants the lock, in Go or in Java.
type waiter struct {
	w     *timeless
	claim *engine.Claim // nil in Java
	owner string
	*java // nil in Go
}

func (w *timeless) ours() *waiter {
	c := w.claim()
	return &waiter{w: w, claim: c, owner: c.ID.String()}
}

func (w *timeless) java(number int) *waiter {
	j := newJava(w.t, w.conn, number, w.wait)
	return &waiter{w: w, owner: j.owner, java: j}
}

// poll makes an attempt and returns how long Redisson would sleep if it fails.
func (u *waiter) poll(lease time.Duration) (acquired bool, ttl time.Duration) {
	u.w.t.Helper()
	if u.claim != nil {
		u.claim.Lease = lease
		a := u.w.acquire(u.claim)
		return a.Acquired, a.FreeIn
	}
	return u.java.poll(lease)
}

func (u *waiter) mustAcquire(lease time.Duration) {
	u.w.t.Helper()
	acquired, _ := u.poll(lease)
	require.True(u.w.t, acquired)
}

func (u *waiter) mustWait() {
	u.w.t.Helper()
	acquired, _ := u.poll(lease)
	require.False(u.w.t, acquired)
}

func (u *waiter) leave() {
	u.w.t.Helper()
	if u.claim != nil {
		require.NoError(u.w.t, u.w.p.Leave(u.w.t.Context(), u.claim))
		return
	}
	u.java.leave()
}

func (u *waiter) release() {
	u.w.t.Helper()
	if u.claim != nil {
		require.Equal(u.w.t, engine.Free, u.w.release(u.claim).State)
		return
	}
	u.java.release()
}

// deadline returns after what time Redisson would evict the waiter.
func (u *waiter) deadline() time.Duration {
	u.w.t.Helper()
	score, err := u.w.conn.Do(u.w.t.Context(), u.w.conn.B().Zscore().Key(wire.FairTimeouts(orders)).Member(u.owner).Build()).AsFloat64()
	require.NoError(u.w.t, err)
	return time.Duration(int64(score)-time.Now().UnixMilli()) * time.Millisecond
}

// heartbeat sends heartbeats of our waiters and reports which are in the queue.
func (w *timeless) heartbeat(of ...*waiter) []bool {
	w.t.Helper()
	leases := make([]watchdog.Subject, len(of))
	for i, u := range of {
		leases[i] = watchdog.Subject{Key: orders, Owner: u.owner}
	}
	renewed := w.p.HeartbeatRenewer().Renew(w.t.Context(), [][]watchdog.Subject{leases}, lease, false)[0]
	require.NoError(w.t, renewed.Err)
	return renewed.Held
}

// confirm confirms the claim of a holder after some waiters have had the lock.
func (w *timeless) confirm(holder *waiter, had []*waiter, waiting ...*waiter) [2]int64 {
	w.t.Helper()
	reply, err := fairlock.ConfirmClaim(w.t.Context(), w.p, holder.claim, ownersOfAll(had), ownersOfAll(waiting))
	require.NoError(w.t, err)
	return reply
}

// live lets time pass while our waiters send heartbeats.
func (w *timeless) live(d time.Duration, of ...*waiter) {
	w.t.Helper()
	for third := (w.p.PositionTTL() / 3).Truncate(time.Millisecond); d > 0; d -= third {
		time.Sleep(min(third, d))
		for _, kept := range w.heartbeat(of...) {
			require.True(w.t, kept, "a live waiter has lost its queue position")
		}
	}
}

// mustOutlive checks that our waiter stays behind a dead one for d, and acquires the lock then.
func (u *waiter) mustOutlive(dead *waiter, d time.Duration) {
	u.w.t.Helper()
	require.Equal(u.w.t, []bool{true}, u.w.heartbeat(u))
	u.w.inOrder(dead, u)
	time.Sleep(d)
	require.Equal(u.w.t, []bool{false}, u.w.heartbeat(u), "it can acquire the lock")
	u.mustAcquire(lease)
	u.release()
	u.w.nothingLeft()
}

// queue returns the waiters in order.
func (w *timeless) queue() []string {
	w.t.Helper()
	owners, err := w.conn.Do(w.t.Context(), w.conn.B().Lrange().Key(wire.FairQueue(orders)).Start(0).Stop(-1).Build()).AsStrSlice()
	require.NoError(w.t, err)
	return owners
}

func ownersOfAll(waiters []*waiter) []string {
	owners := make([]string, len(waiters))
	for i, u := range waiters {
		owners[i] = u.owner
	}
	return owners
}

func (w *timeless) inOrder(of ...*waiter) {
	w.t.Helper()
	require.Equal(w.t, ownersOfAll(of), w.queue())
}

func (w *timeless) nothingLeft() {
	w.t.Helper()
	require.Empty(w.t, w.s.Keys())
}

// mixtures runs a test with every mixture of n waiters in Go and in Java.
func (w *timeless) mixtures(n int, test func(holder *waiter, waiters []*waiter)) {
	for mix := range 2 << n {
		of := func(i int) *waiter {
			if mix&(1<<i) != 0 {
				return w.java(i)
			}
			return w.ours()
		}
		var waiters []*waiter
		for i := range n {
			waiters = append(waiters, of(i))
		}
		w.s.FlushAll()
		test(of(n), waiters)
	}
}

// Redisson has a waiter sleep for the TTL of the lock plus one wait for each waiter before
// it, and sets its deadline one wait later. Our deadlines fit in, for every order of
// arrival, and do not grow when a waiter leaves. If a waiter of ours leaves, Java's waiters
// behind it keep their deadlines.
func TestDeadlinesFitRedissonsArithmetic(t *testing.T) {
	const wait, lease = 5 * time.Second, 30 * time.Second
	inVirtualTime(t, wait, func(t *testing.T, w *timeless) {
		w.mixtures(4, func(holder *waiter, waiters []*waiter) {
			holder.mustAcquire(lease)
			for i, u := range waiters {
				acquired, ttl := u.poll(lease)
				require.False(t, acquired)
				if u.claim == nil {
					require.Equal(t, lease+time.Duration(i)*wait, ttl)
				}
				require.Equal(t, lease+time.Duration(i+1)*wait, u.deadline())
			}

			waiters[1].leave()
			left := []*waiter{waiters[0], waiters[2], waiters[3]}
			for i, u := range left {
				acquired, ttl := u.poll(lease)
				require.False(t, acquired)
				if u.claim == nil || i == 0 {
					require.Equal(t, lease, ttl, "the time of the lock, not of the queue")
				}
				rank := i + 1
				if u.claim == nil && i > 0 && waiters[1].claim != nil {
					rank++ // its rank when it came
				}
				require.Equal(t, lease+time.Duration(rank)*wait, u.deadline())
			}

			holder.release()
			left[0].mustAcquire(lease)
			for i, u := range left[1:] {
				acquired, ttl := u.poll(lease)
				require.False(t, acquired)
				if u.claim == nil || i == 0 {
					require.Equal(t, lease, ttl)
				}
			}
			w.inOrder(left[1:]...)
			left[0].release()
			left[1].mustAcquire(lease)
			left[1].release()
			left[2].mustAcquire(lease)
			left[2].release()
			w.nothingLeft()
		})
	})
}

func TestOneAttemptNeverQueues(t *testing.T) {
	const wait, lease = 100 * time.Millisecond, 500 * time.Millisecond
	inVirtualTime(t, wait, func(t *testing.T, w *timeless) {
		holder := w.ours()
		holder.mustAcquire(lease)
		for range 3 {
			once := w.ours()
			once.claim.Waits, once.claim.Lease = false, lease
			a := w.acquire(once.claim)
			require.Equal(t, engine.Answer{FreeIn: lease}, a)
			require.Empty(t, w.queue())
		}
		holder.release()
		second := w.ours()
		second.claim.Waits = false
		second.mustAcquire(lease)
		third := w.ours()
		third.mustWait()
		w.live(lease-time.Millisecond, third)
		time.Sleep(time.Millisecond)
		third.mustAcquire(lease)
		third.release()
		w.nothingLeft()
	})
}

// However many waiters come and go behind it, or die, no deadline is further away than the
// TTL of the lock plus one wait for each queue position.
func TestDeadlinesDoNotDrift(t *testing.T) {
	const wait, lease = 5 * time.Minute, 30 * time.Second
	inVirtualTime(t, wait, func(t *testing.T, w *timeless) {
		bounded := func() {
			t.Helper()
			scores, err := w.conn.Do(t.Context(), w.conn.B().Zrange().Key(wire.FairTimeouts(orders)).Min("0").Max("-1").Withscores().Build()).AsZScores()
			require.NoError(t, err)
			for i, s := range scores {
				require.LessOrEqual(t, int64(s.Score)-time.Now().UnixMilli(), (lease + time.Duration(i+1)*wait).Milliseconds())
			}
		}
		holder := w.java(0)
		holder.mustAcquire(lease)
		for range 50 { // short tries of three waiters, one after the other, and one that stays
			for i := range 3 {
				u := w.ours()
				if i == 1 {
					u = w.java(1)
				}
				u.mustWait()
				bounded()
				time.Sleep(100 * time.Millisecond)
				u.leave()
				bounded()
			}
			w.java(2).mustWait()
		}
		for range 10 { // waiters that die between Java's waiters
			w.ours().mustWait()
			w.java(3).mustWait()
			bounded()
			time.Sleep(wait / 20)
			w.ours().mustWait()
			bounded()
		}
	})
}

// A live waiter keeps its queue position, however long the lock is held.
func TestOrderOutlivesTheDeadlines(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, first, second := w.ours(), w.ours(), w.ours()
		holder.mustAcquire(time.Hour)
		first.mustWait()
		second.mustWait()
		w.live(20*time.Minute, first, second)
		first.mustWait()
		w.java(1).mustWait()
		w.inOrder(first, second, w.java(1))
	})
}

// A dead waiter delays the others for PositionTTL and no longer.
func TestADeadWaiterIsDroppedSoon(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, dead, second := w.ours(), w.ours(), w.ours()
		holder.mustAcquire(lease)
		dead.mustWait()
		second.mustWait()
		w.live(time.Second, second)
		holder.release()
		acquired, freeIn := second.poll(lease)
		require.False(t, acquired)
		require.Negative(t, freeIn, "it is not the head")
		time.Sleep(w.p.PositionTTL() - time.Second - time.Millisecond)
		second.mustOutlive(dead, time.Millisecond)
	})
}

func TestEveryRequestDropsDeadWaiters(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		for what, request := range map[string]func(holder, third *waiter){
			"attempt":   func(_, third *waiter) { third.mustWait() },
			"heartbeat": func(_, third *waiter) { w.heartbeat(third) },
			"release":   func(holder, _ *waiter) { holder.release() },
			"leave":     func(_, third *waiter) { third.leave() },
			"confirm":   func(holder, third *waiter) { w.confirm(holder, nil, third) },
			"force": func(_, _ *waiter) {
				held, err := w.p.Force(t.Context())
				require.NoError(t, err)
				require.True(t, held)
			},
		} {
			w.s.FlushAll()
			holder, dead, second, third := w.ours(), w.ours(), w.ours(), w.ours()
			if what == "release" || what == "force" {
				holder.mustAcquire(lease)
			} else {
				holder.mustAcquire(w.p.PositionTTL()) // and it is free when the request comes
			}
			for _, u := range []*waiter{dead, second, third} {
				u.mustWait()
			}
			time.Sleep(w.p.PositionTTL() / 2)
			w.heartbeat(second, third)
			w.inOrder(dead, second, third)
			time.Sleep(w.p.PositionTTL()/2 + time.Millisecond)
			request(holder, third)
			require.Equal(t, second.owner, w.queue()[0], what)
		}
	})
}

// Redisson subtracts the wait of the client that acquires the lock from all deadlines. Ours
// subtracts nothing.
func TestALongWaitOfOursEvictsNobody(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, next := w.ours(), w.ours()
		short := w.java(1)
		short.wait = 7 * time.Second
		holder.mustAcquire(lease)
		next.mustWait()
		short.mustWait()
		holder.release()
		next.mustAcquire(lease)
		require.Equal(t, lease+w.wait+short.wait, short.deadline())
		time.Sleep(20 * time.Second)
		next.release()
		short.mustAcquire(lease)
	})
}

// A Java client whose clock is ahead evicts a live waiter only if it is ahead by more than
// one wait, and then the waiter soon is back where it was.
func TestClocksThatAreAhead(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, first, second, early := w.ours(), w.ours(), w.ours(), w.java(1)
		holder.mustAcquire(time.Hour)
		first.mustWait()
		second.mustWait()
		early.ahead = time.Minute
		early.mustWait()
		w.inOrder(first, second, early)

		early.ahead = 2 * time.Hour
		early.mustWait()
		require.NotContains(t, w.queue(), first.owner)
		require.NotContains(t, w.queue(), second.owner)
		require.Equal(t, []bool{true, true}, w.heartbeat(first, second))
		require.Equal(t, []string{first.owner, second.owner}, w.queue()[:2])
	})
}

// An evicted waiter also is back at the head with its next attempt.
func TestAnEvictedWaiterIsFirstAgain(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, evicted, other, early := w.ours(), w.ours(), w.java(2), w.java(1)
		holder.mustAcquire(2 * time.Hour)
		evicted.mustWait()
		other.wait = time.Hour
		other.mustWait()
		early.ahead, early.wait = 2*time.Hour+6*time.Minute, time.Hour
		early.mustWait()
		w.inOrder(other, early)
		holder.release()
		evicted.mustAcquire(lease)
		w.inOrder(other, early)
	})
}

// The keys of a queue whose processes have all died expire, unless a Java client is in it.
func TestADeadQueueExpires(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, a, b := w.ours(), w.ours(), w.ours()
		holder.mustAcquire(lease)
		a.mustWait()
		b.mustWait()
		time.Sleep(lease + 3*w.wait + time.Millisecond)
		w.nothingLeft()

		holder, a = w.ours(), w.ours()
		holder.mustAcquire(lease)
		a.mustWait()
		w.java(1).mustWait()
		w.heartbeat(a)
		time.Sleep(24 * time.Hour)
		w.inOrder(a, w.java(1))
		w.ours().mustAcquire(lease)
		require.Empty(t, w.queue())

		w.s.FlushAll()
		holder, a = w.ours(), w.ours()
		holder.mustAcquire(lease)
		a.mustWait()
		w.java(1).mustWait()
		a.leave()
		time.Sleep(24 * time.Hour)
		w.inOrder(w.java(1))
	})
}

// A confirmation removes the waiters that have had the lock, and counts those that are next.
func TestConfirm(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, a, b, c, java, d := w.ours(), w.ours(), w.ours(), w.ours(), w.java(1), w.ours()
		holder.mustAcquire(lease)
		for _, u := range []*waiter{a, b, c, java, d} {
			u.mustWait()
		}
		require.Equal(t, [2]int64{1, 3}, w.confirm(holder, nil, a, b, c, d))
		require.Equal(t, [2]int64{1, 1}, w.confirm(holder, nil, a, c, b))
		require.Equal(t, [2]int64{1, 0}, w.confirm(holder, nil, b, a))
		require.Equal(t, [2]int64{1, 2}, w.confirm(holder, nil, a, b))

		for range 2 { // the second changes nothing
			require.Equal(t, [2]int64{1, 1}, w.confirm(holder, []*waiter{b, a}, c, d))
			w.inOrder(c, java, d)
		}
		require.Equal(t, [2]int64{}, w.confirm(a, []*waiter{c}, d), "it does not hold the lock")
		w.inOrder(java, d)
		_, err := fairlock.ReleaseAfter(t.Context(), w.p, holder.claim, []string{d.owner})
		require.NoError(t, err)
		w.inOrder(java)
		java.mustAcquire(lease)
		java.release()
		w.nothingLeft()
	})
}

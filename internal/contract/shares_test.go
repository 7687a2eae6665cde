package contract_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// contender is a process whose callers want the same lock again as soon as they have released it.
type contender struct {
	callers int
	rtt     time.Duration // to the server
	java    bool

	rounds atomic.Int64
	mu     sync.Mutex
	waits  []time.Duration
}

// got notes that a caller has the lock.
func (c *contender) got(began time.Time) {
	c.rounds.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waits = append(c.waits, time.Since(began))
}

// reset forgets what it has had.
func (c *contender) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rounds.Store(0)
	c.waits = nil
}

// longest returns the wait that one in a hundred exceeds, and the longest.
func (c *contender) longest() (most, longest time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waits) == 0 {
		return 0, 0
	}
	slices.Sort(c.waits)
	return c.waits[len(c.waits)*99/100], c.waits[len(c.waits)-1]
}

// run has the callers hold the lock until ctx ends.
func (c *contender) run(ctx context.Context, t *testing.T, s *harness.VirtualServer, of doerOf, held time.Duration) (wait func()) {
	s.Latency = c.rtt
	var callers sync.WaitGroup
	if c.java {
		j := newJavaProcess(t, s)
		for n := range c.callers {
			callers.Go(func() { j.loop(ctx, t, c, n, held) })
		}
		return callers.Wait
	}

	client := s.Client(t)
	for range c.callers {
		callers.Go(func() {
			for ctx.Err() == nil {
				began := time.Now()
				assert.NoError(t, of(client)(context.WithoutCancel(ctx), func(context.Context) error {
					c.got(began)
					time.Sleep(held)
					return nil
				}))
			}
		})
	}
	return callers.Wait
}

type doer func(ctx context.Context, f func(ctx context.Context) error) error

// doing returns Do of a lock or of a semaphore.
func doing[O any](l interface {
	Do(ctx context.Context, f func(ctx context.Context) error, opts ...O) error
}) doer {
	return func(ctx context.Context, f func(ctx context.Context) error) error { return l.Do(ctx, f) }
}

type doerOf func(c *redlatch.Client) doer

// javaProcess waits like Redisson: a caller that finds the lock taken subscribes, tries again, and sleeps until
// a message wakes one of the callers of its process.
type javaProcess struct {
	id      string
	conn    rueidis.Client
	mu      chan struct{} // has room for one: in virtual time, a Mutex may not be held during I/O
	wake    chan struct{} // has room for one
	waiting int
	cancel  func()
}

const thinking = 150 * time.Microsecond // between two requests of a thread

var (
	javaLock = wire.NewScript(`
		if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
		redis.call('HSET', KEYS[1], ARGV[1], 1)
		redis.call('PEXPIRE', KEYS[1], 30000)
		return 1`)
	javaUnlock = wire.NewScript(`
		redis.call('DEL', KEYS[1])
		return redis.call('PUBLISH', KEYS[2], 0)`)
)

func newJavaProcess(t *testing.T, s *harness.VirtualServer) *javaProcess {
	return &javaProcess{id: uuid.NewString(), conn: s.Conn(t), mu: make(chan struct{}, 1), wake: make(chan struct{}, 1)}
}

// subscribe subscribes with the first caller that waits, and unsubscribe unsubscribes with the last.
func (j *javaProcess) subscribe(t *testing.T) {
	j.mu <- struct{}{}
	defer func() { <-j.mu }()
	j.waiting++
	if j.waiting > 1 {
		return
	}
	confirmed := make(chan struct{})
	conn, release := j.conn.Dedicate()
	conn.SetPubSubHooks(rueidis.PubSubHooks{
		OnMessage: func(rueidis.PubSubMessage) {
			select {
			case j.wake <- struct{}{}:
			default:
			}
		},
		OnSubscription: func(rueidis.PubSubSubscription) { close(confirmed) },
	})
	assert.NoError(t, conn.Do(context.Background(), conn.B().Subscribe().Channel(wire.LockChannel("shared")).Build()).Error())
	<-confirmed
	j.cancel = func() {
		conn.Close()
		release()
	}
}

func (j *javaProcess) unsubscribe() {
	j.mu <- struct{}{}
	defer func() { <-j.mu }()
	j.waiting--
	if j.waiting == 0 {
		j.cancel()
	}
}

func (j *javaProcess) try(t *testing.T, thread string) bool {
	time.Sleep(thinking)
	got, err := wire.Bool(javaLock.Exec(context.Background(), j.conn, []string{"shared"}, []string{thread}))
	assert.NoError(t, err)
	return got
}

func (j *javaProcess) loop(ctx context.Context, t *testing.T, c *contender, n int, held time.Duration) {
	thread := fmt.Sprintf("%s:%d", j.id, n)
	for ctx.Err() == nil {
		began := time.Now()
		if !j.try(t, thread) {
			j.subscribe(t)
			for !j.try(t, thread) {
				select {
				case <-j.wake:
				case <-time.After(30 * time.Second):
				}
			}
			j.unsubscribe()
		}
		c.got(began)
		time.Sleep(held)
		time.Sleep(thinking)
		assert.NoError(t, javaUnlock.Exec(context.Background(), j.conn, []string{"shared", wire.LockChannel("shared")}, nil).Error())
	}
}

// Processes that always want a lock, or a permit, have it in fair shares, however fast they hear of a release.
func TestShares(t *testing.T) {
	const near = 100 * time.Microsecond
	locks := func(c *redlatch.Client) doer { return doing(c.Lock("shared")) }
	writers := func(c *redlatch.Client) doer { return doing(c.RWLock("shared").Write()) }
	reds := func(c *redlatch.Client) doer { return doing(c.RedLock([]lock.Locker{c.Lock("shared")})) }
	permit := func(c *redlatch.Client) doer { return doing(c.Semaphore("shared", semaphore.Permits(1))) }
	permits := func(c *redlatch.Client) doer { return doing(c.Semaphore("shared", semaphore.Permits(2))) }
	ours := func(n, callers int) (all []*contender) {
		for range n {
			all = append(all, &contender{callers: callers, rtt: near})
		}
		return all
	}
	with := func(all []*contender, more ...*contender) []*contender { return append(all, more...) }

	for _, row := range []struct {
		name       string
		of         doerOf
		held       time.Duration
		contenders []*contender
		least      float64 // the least share of a process beside the greatest
	}{
		{"1 of 8", locks, time.Millisecond, ours(1, 8), 1},
		{"1 of 8 for a permit", permit, time.Millisecond, ours(1, 8), 1},
		{"2 of 16", locks, time.Millisecond, ours(2, 16), 0.77},
		{"16 of 4", locks, time.Millisecond, ours(16, 4), 0.77},
		{"2 of 1", locks, time.Millisecond, ours(2, 1), 0.77},
		{"4 of 8 writers", writers, time.Millisecond, ours(4, 8), 0.77},
		{"2 of 8 for a Redlock", reds, time.Millisecond, ours(2, 8), 0.77},
		{"4 of 32 that hold it for no time", locks, 0, []*contender{
			{callers: 32, rtt: near}, {callers: 32, rtt: 2 * near}, {callers: 32, rtt: 3 * near}, {callers: 32, rtt: 4 * near},
		}, 0.2}, // the turns of the last have a fourth of the rounds
		{"4 of 8 for permits", permits, time.Millisecond, ours(4, 8), 0.77},
		{"1 and 1 in Java", locks, time.Millisecond, with(ours(1, 1), &contender{callers: 1, rtt: near, java: true}), 0.33},
		{"1 and 1 in Java, long", locks, 20 * time.Millisecond, with(ours(1, 1), &contender{callers: 1, rtt: near, java: true}), 0.33},
		{"16 and 16 in Java", locks, time.Millisecond, with(ours(1, 16), &contender{callers: 16, rtt: near, java: true}), 0.33},
		{"2 of 16, and 2 of 16 in Java", locks, time.Millisecond,
			with(ours(2, 16), &contender{callers: 16, rtt: near, java: true}, &contender{callers: 16, rtt: near, java: true}), 0.33},
		{"4, and 4 far away", locks, time.Millisecond, with(ours(1, 4), &contender{callers: 4, rtt: 60 * time.Millisecond}), 0.33},
		{"1, and 1 in another zone", locks, time.Millisecond, with(ours(1, 1), &contender{callers: 1, rtt: 2 * time.Millisecond}), 0.33},
	} {
		t.Run(row.name, func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				ctx, cancel := context.WithCancel(t.Context())
				for _, c := range row.contenders {
					defer c.run(ctx, t, s, row.of, row.held)()
				}
				defer cancel()
				if len(row.contenders) > 1 {
					time.Sleep(700 * time.Millisecond) // they learn how fast the others are
					for _, c := range row.contenders {
						c.reset()
					}
				}
				time.Sleep(time.Duration(harness.Size(1, 10)) * time.Second)

				var rounds []int64
				for _, c := range row.contenders {
					rounds = append(rounds, c.rounds.Load())
					most, longest := c.longest()
					t.Logf("%d rounds, one wait in a hundred longer than %v, the longest %v", c.rounds.Load(), most, longest)
					if len(row.contenders) == 1 {
						require.Less(t, longest, 2*time.Duration(c.callers)*row.held, "the lock is left to nobody")
					}
				}
				least := row.least
				if testing.Short() {
					least *= 0.85 // a second has few turns
				}
				require.GreaterOrEqual(t, float64(slices.Min(rounds)), least*float64(slices.Max(rounds)))
			})
		})
	}
}

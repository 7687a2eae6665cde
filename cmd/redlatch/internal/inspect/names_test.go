package inspect

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// use uses an object of a kind while another client waits for it.
type use struct {
	kind Kind
	do   useFunc
}

// useFunc uses the object of that name, and calls held in the middle.
type useFunc func(t *testing.T, c, other *redlatch.Client, name string, held func())

// uses has a use of each kind of object.
var uses = []use{
	{Lock, useLock(func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) })},
	{Fenced, useLock(func(c *redlatch.Client, name string) lock.Locker { return c.FencedLock(name) })},
	{Fair, useLock(func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) })},
	{Plain, useLock(func(c *redlatch.Client, name string) lock.Locker { return c.PlainLock(name) })},
	{Group, useLock(func(c *redlatch.Client, name string) lock.Locker { return c.GroupLock(name, "a", "b") })},
	{RWLock, useLock(func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() })},
	{RWLock, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		h, err := c.RWLock(name).Read().Lock(t.Context())
		require.NoError(t, err)
		w := harness.StartLock(t, t.Context(), other.RWLock(name).Write())
		harness.Waits(t, 1, other)
		held()
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, w.Got().Unlock(t.Context()))
	}},
	{Semaphore, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		p, err := c.PermitSemaphore(name, semaphore.Permits(1)).Acquire(t.Context(), 1)
		require.NoError(t, err)
		w := harness.Start(t, t.Context(), func(ctx context.Context) (*semaphore.Permit, error) {
			return other.PermitSemaphore(name).Acquire(ctx, 1)
		})
		harness.Waits(t, 1, other)
		held()
		require.NoError(t, p.Release(t.Context()))
		require.NoError(t, w.Got().Release(t.Context()))
	}},
	{Semaphore, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		s := c.Semaphore(name, semaphore.Permits(1))
		require.NoError(t, s.Acquire(t.Context(), 1))
		w := harness.Start(t, t.Context(), func(ctx context.Context) (any, error) {
			return nil, other.Semaphore(name).Acquire(ctx, 1)
		})
		harness.Waits(t, 1, other)
		held()
		require.NoError(t, s.Release(t.Context(), 1))
		w.Got()
	}},
	{Latch, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		l := c.CountDownLatch(name)
		_, err := l.TrySetCount(t.Context(), 1)
		require.NoError(t, err)
		w := harness.Start(t, t.Context(), func(ctx context.Context) (any, error) {
			return nil, other.CountDownLatch(name).Wait(ctx)
		})
		harness.Eventually(t, soon, "it waits", func() bool { return other.Stats().PubSub.Subscribed == 1 })
		held()
		_, err = l.CountDown(t.Context())
		require.NoError(t, err)
		w.Got()
	}},
	{Rate, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		l := c.RateLimiter(name, ratelimit.Rate(1, time.Hour))
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		w := harness.Start(t, t.Context(), func(ctx context.Context) (any, error) {
			return nil, other.RateLimiter(name).Acquire(ctx, 1)
		})
		harness.Waits(t, 1, other)
		harness.Eventually(t, soon, "it listens", func() bool { return other.Stats().PubSub.Subscribed == 1 })
		held()
		_, err := l.Release(t.Context(), 1)
		require.NoError(t, err)
		w.Got()

		_, err = l.Delete(t.Context())
		require.NoError(t, err)
		require.NoError(t, c.RateLimiter(name, ratelimit.Rate(1, time.Hour), ratelimit.PerClient()).TryAcquire(t.Context(), 1))
	}},
	{Election, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		term, err := c.Election(name).Campaign(t.Context(), "a")
		require.NoError(t, err)
		w := harness.Start(t, t.Context(), func(ctx context.Context) (interface{ Resign(context.Context) error }, error) {
			return other.Election(name).Campaign(ctx, "b")
		})
		harness.Waits(t, 1, other)
		held()
		require.NoError(t, term.Resign(t.Context()))
		require.NoError(t, w.Got().Resign(t.Context()))
	}},
	{Once, func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		nothing := func(context.Context) error { return nil }
		_, err := c.Once(name).Run(t.Context(), "a:b", nothing)
		require.NoError(t, err)
		_, err = c.Once(name).MarkDone(t.Context(), "a:c")
		require.NoError(t, err)
		_, err = c.Once(name).Run(t.Context(), "a:d", func(context.Context) error {
			w := harness.Start(t, t.Context(), func(ctx context.Context) (bool, error) {
				return other.Once(name).Run(ctx, "a:d", nothing)
			})
			harness.Waits(t, 1, other)
			held()
			w.Leave()
			return nil
		})
		require.NoError(t, err)
	}},
}

func useLock(of func(c *redlatch.Client, name string) lock.Locker) useFunc {
	return func(t *testing.T, c, other *redlatch.Client, name string, held func()) {
		h, err := of(c, name).Lock(t.Context())
		require.NoError(t, err)
		w := harness.StartLock(t, t.Context(), of(other, name))
		harness.Waits(t, 1, other)
		held()
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, w.Got().Unlock(t.Context()))
	}
}

// recorder collects the names of all keys that are written, and of all channels with a message.
type recorder struct {
	mu    sync.Mutex
	names map[string]bool
}

// record starts a recorder, which the end of the test ends.
func record(t *testing.T, s *testserver.Server) *recorder {
	t.Helper()
	r := &recorder{names: map[string]bool{}}
	harness.Do(t, s.Addr, "CONFIG", "SET", "notify-keyspace-events", "EA")
	conn := harness.Conn(t, s.Addr)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- conn.Receive(ctx, conn.B().Psubscribe().Pattern("*").Build(), func(m rueidis.PubSubMessage) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if strings.HasPrefix(m.Channel, "__keyevent@") {
				r.names[m.Message] = true
			} else {
				r.names[m.Channel] = true
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
	})
	harness.Eventually(t, soon, "it listens", func() bool { return harness.Do(t, s.Addr, "PUBSUB", "NUMPAT") == ":1" })
	return r
}

// seen returns the names since the last call.
func (r *recorder) seen(t *testing.T, s *testserver.Server) []string {
	t.Helper()
	harness.Do(t, s.Addr, "PUBLISH", "end", "")
	harness.Eventually(t, soon, "the last message", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.names["end"]
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, "end")
	all := slices.Sorted(maps.Keys(r.names))
	clear(r.names)
	return all
}

// Each key and channel that the library uses for an object of any kind is in the table of forms, with its type
// and kind, and each form of the table is used. A scan finds the object and tells its kind.
func TestEveryKeyIsClassified(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		r, recorder := readerOf(t, s.Addr), record(t, s)
		used := map[wire.Role]bool{}
		classify := func(key, name string, kind Kind) wire.Key {
			t.Helper()
			k, ok := wire.ParseKey(key)
			require.True(t, ok, "%s of %s %q", key, kind, name)
			used[k.Role] = true
			require.Contains(t, k.Form().Kinds, string(kind), key)
			if work, _, isRun := SlotOf(k.Name); isRun {
				k.Name = work // the channel of the lock of a run
			}
			require.Equal(t, name, k.Name, key)
			return k
		}
		for _, u := range uses {
			for _, name := range []string{"jobs", "a{b}c"} {
				c, other := harness.Client(t, s), harness.Client(t, s)
				u.do(t, c, other, name, func() {
					// A client enters the wait queue of a semaphore after it has waited for 100 ms.
					if u.kind == Semaphore {
						harness.Eventually(t, soon, "it is in the queue", func() bool {
							o, err := r.Read(t.Context(), name)
							require.NoError(t, err)
							return o.Waiting == 1
						})
					}
					keys, err := testserver.Query(s.Addr, "KEYS", "*")
					require.NoError(t, err)
					for _, key := range keys {
						if key != name {
							k := classify(key, name, u.kind)
							require.Equal(t, "+"+k.Form().Type, harness.Do(t, s.Addr, "TYPE", key), key)
						}
					}
					channels, err := testserver.Query(s.Addr, "PUBSUB", "CHANNELS")
					require.NoError(t, err)
					for _, channel := range channels {
						require.Empty(t, classify(channel, name, u.kind).Form().Type, channel)
					}

					found := names(t, r, "*")
					if u.kind == Once {
						require.Equal(t, []string{wire.OnceRun(name, "a:b"), wire.OnceRun(name, "a:c"), wire.OnceRun(name, "a:d")}, found)
					} else {
						require.Equal(t, []string{name}, found)
					}
					objects, err := r.ReadAll(t.Context(), found)
					require.NoError(t, err)
					for _, o := range objects {
						require.Equal(t, u.kind, o.Kind, o.Name)
						require.Empty(t, o.Anomalies, o.Name)
					}
				})
				for _, key := range recorder.seen(t, s) {
					if key != name {
						classify(key, name, u.kind)
					}
				}
				harness.Do(t, s.Addr, "FLUSHALL")
				c.Close()
				other.Close()
			}
		}
		for role, form := range wire.Forms {
			require.True(t, used[wire.Role(role)], "no object has used %s", form.Of("NAME"))
		}
	})
}

// A slot is known by the name of its work and by the names of its keys, with a prefix and without one, whether its work
// runs, has been done, or both.
func TestSlots(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, prefix := range []string{"", "app:", "{app}:"} {
			r := readerOf(t, s.Addr)
			r.Prefix = prefix
			c := harness.Client(t, s, redlatch.WithNameMapper(func(name string) string { return prefix + name }))
			run, memory := wire.OnceRun("report", "1"), wire.OnceDone("report", "1")
			get := func(name string) Object {
				t.Helper()
				o, err := r.Read(t.Context(), name)
				require.NoError(t, err)
				require.Equal(t, name, o.Name)
				require.Equal(t, wire.OnceRun(prefix+"report", "1"), o.Key)
				return o
			}
			for _, name := range []string{run, memory} {
				o := get(name)
				require.Equal(t, None, o.Kind)
				require.Equal(t, &Slot{Work: "report", Slot: "1"}, o.Slot)
			}

			job := c.Once("report", once.Remember(time.Hour))
			_, err := job.Run(t.Context(), "1", func(context.Context) error {
				o := get(run)
				require.Equal(t, Once, o.Kind)
				require.True(t, o.Held)
				require.Equal(t, c.ID(), o.Holders[0].Client)
				require.Nil(t, o.Slot.Done)
				require.Equal(t, []string{run}, names(t, r, "*"))
				_, err := job.MarkDone(t.Context(), "1")
				require.NoError(t, err)
				o = get(run)
				require.True(t, o.Held)
				require.NotNil(t, o.Slot.Done)
				require.Equal(t, "hash", o.Type)
				require.Less(t, time.Duration(*o.Expires), time.Minute)
				return nil
			})
			require.NoError(t, err)
			for _, name := range []string{run, memory} {
				o := get(name)
				require.Equal(t, Once, o.Kind)
				require.False(t, o.Held)
				require.Empty(t, o.Holders)
				require.Empty(t, o.Anomalies)
				require.Equal(t, "string", o.Type)
				require.Equal(t, c.ID(), o.Slot.Done.By.Client)
				require.WithinDuration(t, time.Now(), *o.Slot.Done.Since, time.Minute)
				require.InDelta(t, time.Hour, time.Duration(*o.Slot.Done.Left), float64(time.Minute))
				require.Equal(t, o.Expires, o.Slot.Done.Left)
			}
			require.Equal(t, []string{run}, names(t, r, "rep*"))
			require.Equal(t, []string{run}, names(t, r, "*:1"))
			require.Empty(t, names(t, r, "app*"))
			require.Empty(t, names(t, &Reader{Conn: r.Conn, Prefix: prefix + "report"}, "*"), "the work would have no name")
			harness.Do(t, s.Addr, "FLUSHALL")
		}

		r := readerOf(t, s.Addr)
		harness.Do(t, s.Addr, "SET", wire.OnceDone("jobs", "1"), java)
		o, err := r.Read(t.Context(), wire.OnceRun("jobs", "1"))
		require.NoError(t, err)
		require.Equal(t, "no-expiry", o.Anomalies[0].Code)
		require.Nil(t, o.Slot.Done.Since)
		require.Equal(t, java, o.Slot.Done.By.ID)
		harness.Do(t, s.Addr, "DEL", wire.OnceDone("jobs", "1"))
		harness.Do(t, s.Addr, "RPUSH", wire.OnceDone("jobs", "1"), java)
		o, err = r.Read(t.Context(), wire.OnceRun("jobs", "1"))
		require.NoError(t, err)
		require.Equal(t, "wrong-type", o.Anomalies[0].Code)
		require.Nil(t, o.Slot.Done)
		harness.Do(t, s.Addr, "SET", wire.OnceRun("jobs", "1"), "x")
		o, err = r.Read(t.Context(), wire.OnceRun("jobs", "1"))
		require.NoError(t, err)
		require.Equal(t, Other, o.Kind)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

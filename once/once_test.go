package once_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	// name is the work of most tests, and slot its slot.
	name = "report"
	slot = "monday"
	// soon is well below the safety poll.
	soon = 3 * time.Second
)

var errWork = errors.New("the work failed")

// counter is work that counts its runs and returns err.
type counter struct {
	runs atomic.Int64
	err  error
}

func (w *counter) work(context.Context) error {
	w.runs.Add(1)
	return w.err
}

// outcome is what Run returned, besides its error.
type outcome struct{ ran bool }

// start calls Run in the background.
func start(t testing.TB, o *once.Once, slot string, fn func(context.Context) error, opts ...lock.Option) *harness.Call[outcome] {
	t.Helper()
	return harness.Start(t, t.Context(), func(ctx context.Context) (outcome, error) {
		ran, err := o.Run(ctx, slot, fn, opts...)
		return outcome{ran}, err
	})
}

// blocked is work that says that it runs, and ends with what the test sends.
type blocked struct {
	begun  chan context.Context
	result chan error
}

func newBlocked() *blocked { return &blocked{make(chan context.Context, 1), make(chan error, 1)} }

func (b *blocked) work(ctx context.Context) error {
	b.begun <- ctx
	return <-b.result
}

// occupy runs the work of the slot in the background, and returns when it runs.
func occupy(t testing.TB, o *once.Once, opts ...lock.Option) (*harness.Call[outcome], *blocked) {
	t.Helper()
	b := newBlocked()
	call := start(t, o, slot, b.work, opts...)
	harness.Receive(t, soon, "the work", b.begun)
	return call, b
}

func done(t testing.TB, o *once.Once, slot string) bool {
	t.Helper()
	done, err := o.Done(t.Context(), slot)
	require.NoError(t, err)
	return done
}

func forget(t testing.TB, o *once.Once, slot string) bool {
	t.Helper()
	had, err := o.Forget(t.Context(), slot)
	require.NoError(t, err)
	return had
}

// runs runs the work of the slot in the foreground.
func runs(t testing.TB, o *once.Once, slot string, fn func(context.Context) error, opts ...lock.Option) bool {
	t.Helper()
	ran, err := o.Run(t.Context(), slot, fn, opts...)
	require.NoError(t, err)
	return ran
}

func TestSlots(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, b := harness.Client(t, s).Once(name), harness.Client(t, s).Once(name)
		require.Equal(t, name, a.Name())
		var w counter
		require.False(t, done(t, a, slot))
		require.True(t, runs(t, a, slot, w.work))
		require.True(t, done(t, b, slot))
		require.False(t, runs(t, a, slot, w.work))
		require.False(t, runs(t, b, slot, w.work))
		require.EqualValues(t, 1, w.runs.Load())

		// Other slots, and other work, are not done.
		require.True(t, runs(t, b, "tuesday", w.work))
		require.True(t, runs(t, harness.Client(t, s).Once("other"), slot, w.work))

		require.True(t, forget(t, a, slot))
		require.False(t, forget(t, a, slot))
		require.False(t, done(t, b, slot))
		require.True(t, runs(t, b, slot, w.work))
		require.EqualValues(t, 4, w.runs.Load())
	})
}

// What one slot leaves is a key with an expiry.
func TestRemember(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var w counter
		for _, row := range []struct {
			remember, atLeast, want time.Duration
		}{
			{0, 0, 24 * time.Hour},
			{time.Hour, 0, time.Hour},
			{time.Hour, time.Minute, time.Hour},
			{time.Minute, time.Hour, time.Hour},
		} {
			o := c.Once(name)
			if row.remember > 0 {
				o = c.Once(name, once.Remember(row.remember))
			}
			require.True(t, runs(t, o, slot, w.work, lock.AtLeast(row.atLeast)))
			left := time.Duration(harness.PTTL(t, s.Addr, wire.OnceDone(name, slot))) * time.Millisecond
			require.LessOrEqual(t, left, row.want)
			require.Greater(t, left, row.want-soon)
			require.True(t, forget(t, o, slot))
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// A slot that is marked as done is done for as long as it would be after a success, or as long as it was before.
func TestMarkDone(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, operator := harness.Client(t, s), harness.Client(t, s)
		var w counter
		marks := func(remember time.Duration) bool {
			t.Helper()
			marked, err := operator.Once(name, once.Remember(remember)).MarkDone(t.Context(), slot)
			require.NoError(t, err)
			return marked
		}
		lasts := func(want time.Duration) {
			t.Helper()
			left := time.Duration(harness.PTTL(t, s.Addr, wire.OnceDone(name, slot))) * time.Millisecond
			require.LessOrEqual(t, left, want)
			require.Greater(t, left, want-time.Minute)
		}
		require.True(t, marks(time.Hour))
		lasts(time.Hour)
		require.False(t, marks(3*time.Hour))
		lasts(3 * time.Hour)
		require.False(t, marks(2*time.Hour))
		lasts(3 * time.Hour)
		require.False(t, runs(t, c.Once(name), slot, w.work))

		require.True(t, forget(t, c.Once(name), slot))
		require.True(t, runs(t, c.Once(name), slot, w.work))
		require.False(t, marks(30*24*time.Hour))
		stored, err := wire.Read(t.Context(), harness.Conn(t, s.Addr), "GET", wire.OnceDone(name, slot)).ToString()
		require.NoError(t, err)
		owner, at := wire.ParseOnceDone(stored)
		require.Contains(t, owner, c.ID(), "who did the work")
		require.WithinDuration(t, time.Now(), at, time.Minute)

		// A run goes on, and those that wait for it find the work done even if it fails.
		require.True(t, forget(t, c.Once(name), slot))
		first, work := occupy(t, c.Once(name))
		other := harness.Client(t, s)
		next := start(t, other.Once(name), slot, w.work)
		harness.Waits(t, 1, other)
		require.True(t, marks(time.Hour))
		require.True(t, first.Running())
		require.True(t, next.Running())
		work.result <- errWork
		require.Equal(t, errWork, first.End())
		require.False(t, next.Got().ran)
		require.EqualValues(t, 1, w.runs.Load())
	})
}

// Work that fails, panics or ends its goroutine is repeated, by the next that waits for it.
func TestFailure(t *testing.T) {
	for what, fail := range map[string]func() error{
		"error":  func() error { return errWork },
		"panic":  func() error { panic(errWork) },
		"goexit": func() error { runtime.Goexit(); return nil },
	} {
		t.Run(what, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				a, second := harness.Client(t, s), harness.Client(t, s)
				begun, finish := make(chan struct{}), make(chan struct{})
				ended := make(chan any, 1)
				go func() {
					var ran bool
					var err error
					defer func() {
						panicked := recover()
						if panicked == nil && (ran || err != nil) {
							require.True(t, ran)
							ended <- err
							return
						}
						ended <- panicked
					}()
					ran, err = a.Once(name).Run(t.Context(), slot, func(context.Context) error {
						close(begun)
						<-finish
						return fail()
					})
				}()
				harness.Receive(t, soon, "the work", begun)
				var w counter
				next := start(t, second.Once(name), slot, w.work)
				harness.Waits(t, 1, second)
				require.Zero(t, w.runs.Load())
				close(finish)
				if result := harness.Receive(t, soon, "the end", ended); what != "goexit" {
					require.Equal(t, errWork, result)
				}
				require.True(t, next.Got().ran)
				require.EqualValues(t, 1, w.runs.Load())
				require.True(t, forget(t, a.Once(name), slot))
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

// Those that wait while the work succeeds find it done.
func TestWaitersFindTheWorkDone(t *testing.T) {
	const waiters = 8
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, b := harness.Client(t, s), harness.Client(t, s)
		first, work := occupy(t, a.Once(name), lock.AtLeast(time.Hour))
		var calls []*harness.Call[outcome]
		var w counter
		for i := range waiters {
			calls = append(calls, start(t, []*redlatch.Client{a, b}[i%2].Once(name), slot, w.work, lock.AtLeast(time.Hour)))
		}
		harness.Waits(t, waiters, a, b)
		work.result <- nil
		require.True(t, first.Got().ran)
		for _, call := range calls {
			require.NoError(t, call.EndWithin(soon), "AtLeast keeps only a slot whose work may run again")
			require.False(t, call.Value.ran)
		}
		require.Zero(t, w.runs.Load())
		require.True(t, forget(t, a.Once(name), slot))
		harness.NothingLeft(t, s.Addr)
	})
}

// A machine that does not wait, or no longer, gets an error while another runs the work.
func TestNotAcquired(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, b := harness.Client(t, s), harness.Client(t, s)
		first, work := occupy(t, a.Once(name))
		var w counter
		ran, err := b.Once(name).Run(t.Context(), slot, w.work, lock.Wait(0))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.False(t, ran)
		waits := start(t, b.Once(name), slot, w.work)
		harness.Waits(t, 1, b)
		cause := errors.New("over")
		waits.Cancel(cause)
		err = waits.EndWithin(soon)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, cause)
		require.False(t, waits.Value.ran)
		work.result <- nil
		require.True(t, first.Got().ran)
		require.Zero(t, w.runs.Load())
	})
}

// A wait may run out just after the work has succeeded and before its lock is free.
func TestDoneWhenTheWaitIsOver(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, g := harness.GatedClient(t, s)
		b := harness.Client(t, s)
		o := b.Once(name)
		key := wire.OnceRun(name, slot)
		first, work := occupy(t, a.Once(name))
		g.Keep(t, wire.OnceDone(name, slot), 1, func() { work.result <- nil }) // the reply to SET
		require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", key))
		harness.Do(t, s.Addr, "RENAME", wire.OnceDone(name, slot), "{"+name+"}:aside")
		var w counter
		waits := start(t, o, slot, w.work, lock.Wait(2*time.Second))
		harness.Waits(t, 1, b)
		harness.Do(t, s.Addr, "RENAME", "{"+name+"}:aside", wire.OnceDone(name, slot))
		require.NoError(t, waits.EndWithin(2*soon))
		require.False(t, waits.Value.ran)
		require.NoError(t, g.Open())
		require.True(t, first.Got().ran)
		require.Zero(t, w.runs.Load())
	})
}

// AtLeast delays the next attempt after a failure, also of other machines, and only that.
func TestAtLeast(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		a, b := s.Client(t).Once(name), s.Client(t).Once(name)
		w := counter{err: errWork}
		ran, err := a.Run(t.Context(), slot, w.work, lock.AtLeast(time.Minute))
		require.True(t, ran)
		require.Equal(t, errWork, err)
		w.err = nil
		next := start(t, b, slot, w.work, lock.AtLeast(time.Minute))
		time.Sleep(time.Minute - time.Millisecond)
		synctest.Wait()
		require.True(t, next.Running())
		time.Sleep(time.Millisecond)
		require.True(t, next.Got().ran)

		require.True(t, forget(t, a, slot))
		began := time.Now()
		require.True(t, runs(t, a, slot, w.work, lock.AtLeast(time.Minute)), "the slot is free after a success")
		require.Zero(t, time.Since(began))

		// A run that lasts longer is not kept.
		require.True(t, forget(t, a, slot))
		_, err = a.Run(t.Context(), slot, func(context.Context) error {
			time.Sleep(time.Minute)
			return errWork
		}, lock.AtLeast(time.Minute))
		require.Equal(t, errWork, err)
		began = time.Now()
		require.True(t, runs(t, b, slot, w.work))
		require.Zero(t, time.Since(began))
	})
}

// Work that goes on after its lock was lost is remembered if it succeeds.
func TestSuccessAfterALoss(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second))
		o := c.Once(name)
		ran, err := o.Run(t.Context(), slot, func(ctx context.Context) error {
			harness.Do(t, s.Addr, "DEL", wire.OnceRun(name, slot))
			harness.Receive(t, soon, "the loss", ctx.Done())
			return nil
		})
		require.True(t, ran)
		var both *lock.DoError
		require.ErrorAs(t, err, &both)
		require.NoError(t, both.Func)
		require.ErrorIs(t, err, lock.ErrLost)
		require.True(t, done(t, o, slot))
	})
}

// The same time is the same slot in every time zone, however it was read.
func TestAt(t *testing.T) {
	at := time.Date(2026, 10, 25, 2, 30, 0, 0, time.FixedZone("summer", 2*60*60))
	require.Equal(t, "20261025T003000Z", once.At(at))
	require.Equal(t, once.At(at), once.At(at.UTC()))
	require.NotEqual(t, once.At(at), once.At(at.Add(time.Nanosecond)))
	require.NotEqual(t, once.At(at), once.At(at.Add(time.Hour)))
	now := time.Now()
	require.Equal(t, once.At(now.Round(0)), once.At(now))
}

// One owner cannot run the work of a slot within itself.
func TestNamedOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		o := c.Once(name)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		var w counter
		ran, err := o.Run(ctx, slot, func(ctx context.Context) error {
			ran, err := o.Run(ctx, slot, w.work)
			require.False(t, ran)
			return err
		})
		require.True(t, ran)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.Zero(t, w.runs.Load())
		harness.NothingLeft(t, s.Addr)
	})
}

func TestInvalid(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var none context.Context
		var w counter
		valid := c.Once(name)
		for what, call := range map[string]func() error{
			"name":              func() error { return only(c.Once("").Run(t.Context(), slot, w.work)) },
			"name of Done":      func() error { return only(c.Once("").Done(t.Context(), slot)) },
			"name of Forget":    func() error { return only(c.Once("").Forget(t.Context(), slot)) },
			"nil option":        func() error { return only(c.Once(name, nil).Run(t.Context(), slot, w.work)) },
			"no memory":         func() error { return only(c.Once(name, once.Remember(0)).Run(t.Context(), slot, w.work)) },
			"negative memory":   func() error { return only(c.Once(name, once.Remember(-1)).Done(t.Context(), slot)) },
			"endless memory":    func() error { return only(c.Once(name, once.Remember(lock.MaxLease+1)).Forget(t.Context(), slot)) },
			"slot":              func() error { return only(valid.Run(t.Context(), "", w.work)) },
			"slot of Done":      func() error { return only(valid.Done(t.Context(), "")) },
			"slot of Forget":    func() error { return only(valid.Forget(t.Context(), "")) },
			"slot of MarkDone":  func() error { return only(valid.MarkDone(t.Context(), "")) },
			"memory of a mark":  func() error { return only(c.Once(name, once.Remember(0)).MarkDone(t.Context(), slot)) },
			"function":          func() error { return only(valid.Run(t.Context(), slot, nil)) },
			"option of Run":     func() error { return only(valid.Run(t.Context(), slot, w.work, nil)) },
			"options together":  func() error { return only(valid.Run(t.Context(), slot, w.work, lock.AtLeast(2), lock.MaxHold(1))) },
			"context":           func() error { return only(valid.Run(none, slot, w.work)) },
			"context of Done":   func() error { return only(valid.Done(none, slot)) },
			"context of Forget": func() error { return only(valid.Forget(none, slot)) },
		} {
			require.ErrorIs(t, call(), lock.ErrInvalid, what)
		}
		require.Zero(t, w.runs.Load())
		harness.NothingLeft(t, s.Addr)

		c.Close()
		for _, err := range []error{
			only(valid.Run(t.Context(), slot, w.work)), only(valid.Done(t.Context(), slot)), only(valid.Forget(t.Context(), slot)),
			only(valid.MarkDone(t.Context(), slot)),
		} {
			require.ErrorIs(t, err, lock.ErrClosed)
		}
		require.Zero(t, w.runs.Load())
	})
}

// Names and slots that look alike do not share keys.
func TestKeys(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var w counter
		var rows [][2]string
		for _, name := range []string{"a", "{a}", "a:b", "a:"} {
			for _, slot := range []string{"b", "b:c", "c", ":", "%3A", " \x00\r\n'ü", "}"} {
				rows = append(rows, [2]string{name, slot})
			}
		}
		for _, row := range rows {
			require.False(t, done(t, c.Once(row[0]), row[1]), row)
			require.True(t, runs(t, c.Once(row[0]), row[1], w.work), row)
			require.True(t, done(t, c.Once(row[0]), row[1]), row)
		}
		require.EqualValues(t, len(rows), w.runs.Load())
	})
}

// only returns the error of two results.
func only(_ any, err error) error { return err }

// refused fails the test unless err is the refusal of the server and nothing else.
func refused(t testing.TB, err error, with string) {
	t.Helper()
	var refusal *rueidis.RedisError
	require.ErrorAs(t, err, &refusal)
	require.ErrorContains(t, err, with)
	for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrLost} {
		require.NotErrorIs(t, err, kind)
	}
}

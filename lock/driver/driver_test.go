package driver_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
	"github.com/redlatch/redlatch/redlatchtest"
)

// fake is a driver that does what a test says.
type fake struct {
	acquire func(ctx context.Context, r driver.Request) (driver.Claim, error)
	release func(ctx context.Context) error
	extend  error
	until   time.Duration
	closed  int
}

func (f *fake) Store() string          { return "fake" }
func (f *fake) CheckName(string) error { return nil }
func (f *fake) Close()                 { f.closed++ }
func (f *fake) Acquire(ctx context.Context, r driver.Request) (driver.Claim, error) {
	if f.acquire != nil {
		return f.acquire(ctx, r)
	}
	return f.claim(), nil
}

func (f *fake) claim() driver.Claim {
	until := f.until
	if until == 0 {
		until = time.Hour
	}
	return &fakeClaim{f, time.Now().Add(until)}
}

type fakeClaim struct {
	f     *fake
	until time.Time
}

func (c *fakeClaim) Token() int64                                { return 0 }
func (c *fakeClaim) Until() time.Time                            { return c.until }
func (c *fakeClaim) Extend(context.Context, time.Duration) error { return c.f.extend }
func (c *fakeClaim) Release(ctx context.Context) error {
	if c.f.release != nil {
		return c.f.release(ctx)
	}
	return nil
}

func newClient(t testing.TB, d driver.Driver, opts ...driver.Option) *driver.Client {
	c := driver.NewClient(d, opts...)
	t.Cleanup(c.Close)
	return c
}

func nothing(context.Context) error { return nil }

// log is a logger whose lines a test can read.
type log struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *log) option() driver.Option { return driver.WithLogger(slog.New(slog.NewTextHandler(l, nil))) }

// The faults of a store are no faults of the lock.
func TestLostRepliesAndLatency(t *testing.T) {
	for _, lossy := range []int{2, 3, 7} {
		t.Run(fmt.Sprint("one in ", lossy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStore()
				s.Lossy, s.Latency = lossy, 3*time.Millisecond
				var inside, entries int
				var all sync.WaitGroup
				for range 3 {
					c := s.client(t)
					for range 3 {
						all.Go(func() {
							for range 5 {
								err := c.Lock("orders").Do(t.Context(), func(ctx context.Context) error {
									inside++
									assert.Equal(t, 1, inside)
									entries++
									time.Sleep(time.Millisecond)
									inside--
									return nil
								})
								if err != nil && !errors.Is(err, lock.ErrLost) { // too many heartbeats were lost
									assert.ErrorIs(t, err, lock.ErrIndeterminate) // of the release
								}
							}
						})
					}
				}
				all.Wait()
				require.Equal(t, 3*3*5, entries)
				time.Sleep(time.Minute)
				require.Empty(t, s.Left("orders"))
			})
		})
	}
}

// The error of a driver has its class, and none that it does not say.
func TestErrorsOfDrivers(t *testing.T) {
	boom := errors.New("no rights")
	for _, row := range []struct{ err, want error }{
		{lock.ErrNotAcquired, lock.ErrNotAcquired},
		{fmt.Errorf("%w: gone fishing", lock.ErrUnavailable), lock.ErrUnavailable},
		{errors.Join(lock.ErrIndeterminate, context.DeadlineExceeded), lock.ErrIndeterminate},
		{fmt.Errorf("store: %w", boom), boom},
		{fmt.Errorf("%w: that", lock.ErrUnsupported), lock.ErrUnsupported},
	} {
		f := &fake{acquire: func(context.Context, driver.Request) (driver.Claim, error) { return nil, row.err }}
		c := newClient(t, f)
		_, err := c.Lock("orders").Lock(t.Context())
		var call *lock.Error
		require.ErrorAs(t, err, &call)
		require.Equal(t, "acquire", call.Op)
		require.Equal(t, "fake", call.Kind)
		for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrUnsupported, boom} {
			require.Equal(t, kind == row.want, errors.Is(err, kind), "%v: %v", err, kind)
		}
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.True(t, strings.HasPrefix(err.Error(), "redlatch: ") && strings.Count(err.Error(), "redlatch: ") == 1, err.Error())

		f.acquire = nil
		f.release = func(context.Context) error { return row.err }
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, h.Unlock(t.Context()), row.want)
	}
}

// A caller gets no claim that is over, or whose context has: it is released.
func TestClaimsThatComeTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		released := 0
		f := &fake{release: func(context.Context) error { released++; return nil }}
		c := newClient(t, f)
		f.until = -time.Millisecond
		_, err := c.Lock("orders").Lock(t.Context(), lock.Lease(time.Second))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorContains(t, err, "over")
		synctest.Wait() // the release

		f.until = 0
		ctx, cancel := context.WithCancel(t.Context())
		f.acquire = func(context.Context, driver.Request) (driver.Claim, error) { cancel(); return f.claim(), nil }
		_, err = c.Lock("orders").Lock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, context.Canceled)
		synctest.Wait()
		require.Equal(t, 2, released)

		// One that is lost before the call returns is requested again, and not released.
		calls := 0
		f.acquire = func(_ context.Context, r driver.Request) (driver.Claim, error) {
			if calls++; calls < 3 {
				r.Lost(lock.ReasonGone, nil)
			}
			return f.claim(), nil
		}
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		require.Equal(t, 3, calls)
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, 3, released)
		calls = 0
		_, err = c.Lock("orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, 1, calls)
	})
}

// A driver that does not notice that its claim is over has it ended, and its Lost ends all holds.
func TestHoldsEndWithTheirClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lost func(lock.Reason, error)
		released := 0
		f := &fake{until: 1234 * time.Millisecond, release: func(context.Context) error { released++; return lock.ErrLost }}
		f.acquire = func(_ context.Context, r driver.Request) (driver.Claim, error) { lost = r.Lost; return f.claim(), nil }
		c := newClient(t, f)
		l := c.Lock("orders")
		began := time.Now()
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		<-h.Context().Done()
		require.Equal(t, f.until, time.Since(began))
		var loss *lock.LostError
		require.ErrorAs(t, h.Unlock(t.Context()), &loss)
		require.Equal(t, lock.ReasonExpired, loss.Reason)
		synctest.Wait()
		require.Equal(t, 1, released)

		boom := errors.New("boom")
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		for range 2 {
			h, err = l.Lock(ctx)
			require.NoError(t, err)
		}
		lost(lock.ReasonGone, boom)
		for range 2 {
			err := l.UnlockOwner(ctx)
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorIs(t, err, boom)
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		require.ErrorIs(t, l.UnlockOwner(ctx), lock.ErrNotHeld)
		require.Equal(t, 1, released)

		h, err = l.Lock(t.Context())
		require.NoError(t, err)
		require.ErrorAs(t, h.Unlock(t.Context()), &loss)
		require.Equal(t, lock.ReasonGone, loss.Reason)

		// What ends a hold is its time, not when somebody notices.
		f.release = nil
		for range 20 {
			for _, end := range []func(h lock.Hold) error{
				func(h lock.Hold) error { return h.Unlock(t.Context()) },
				func(h lock.Hold) error { return h.Extend(t.Context(), time.Second) },
			} {
				h, err := l.Lock(t.Context(), lock.Lease(250*time.Millisecond))
				require.NoError(t, err)
				time.Sleep(h.Remaining())
				require.ErrorIs(t, end(h), lock.ErrLost)
			}
		}
	})
}

// A claim that Extend does not find is released, once: the driver may still know of it.
func TestExtendOfALostClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lost func(lock.Reason, error)
		released := 0
		f := &fake{release: func(context.Context) error { released++; return lock.ErrLost }, extend: lock.ErrLost}
		f.acquire = func(_ context.Context, r driver.Request) (driver.Claim, error) { lost = r.Lost; return f.claim(), nil }
		c := newClient(t, f)
		for _, told := range []bool{false, true} {
			h, err := c.Lock("orders").Lock(t.Context(), lock.Lease(time.Minute))
			require.NoError(t, err)
			if told {
				lost(lock.ReasonGone, nil)
			}
			require.ErrorIs(t, h.Extend(t.Context(), time.Hour), lock.ErrLost)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			synctest.Wait()
			require.Equal(t, 1, released)
		}
	})
}

// panicking is a span processor that panics at the start, or the end, of a span.
type panicking struct{ at atomic.Value }

func (p *panicking) OnStart(_ context.Context, s trace.ReadWriteSpan) { p.look("start " + s.Name()) }
func (p *panicking) OnEnd(s trace.ReadOnlySpan)                       { p.look("end " + s.Name()) }
func (p *panicking) Shutdown(context.Context) error                   { return nil }
func (p *panicking) ForceFlush(context.Context) error                 { return nil }

func (p *panicking) look(at string) {
	if at == p.at.Load() {
		panic("an exporter panics")
	}
}

// If an exporter panics, the lock is not left held, and Close closes the driver.
func TestTelemetryThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		p := new(panicking)
		c := s.client(t, driver.WithTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(p))))
		l := c.Lock("orders")
		for _, at := range []string{"start redlatch.hold", "end redlatch.acquire", "start redlatch.release", "end redlatch.release"} {
			p.at.Store(at)
			require.Panics(t, func() { _ = l.Do(t.Context(), nothing) }, at)
			p.at.Store("")
			require.NoError(t, s.client(t).Lock("orders").Do(t.Context(), nothing, lock.Wait(time.Second)), at)
		}

		_, err := l.Lock(t.Context())
		require.NoError(t, err)
		p.at.Store("end redlatch.hold")
		require.Panics(t, c.Close)
		require.NoError(t, s.client(t).Lock("orders").Do(t.Context(), nothing, lock.Wait(0)))
	})
}

// Unlock does not block for longer than 5 s, and Close not at all behind it.
func TestUnlockIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{release: func(ctx context.Context) error { <-ctx.Done(); return lock.ErrIndeterminate }}
		c := newClient(t, f)
		for _, closes := range []bool{false, true} {
			began := time.Now()
			h, err := c.Lock("orders").Lock(t.Context())
			require.NoError(t, err)
			if closes {
				time.AfterFunc(time.Second, c.Close)
			}
			err = h.Unlock(t.Context())
			require.ErrorIs(t, err, lock.ErrIndeterminate)
			require.Equal(t, closes, errors.Is(err, lock.ErrClosed))
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, map[bool]time.Duration{false: 5 * time.Second, true: time.Second}[closes], time.Since(began))
		}
		c.Close()
		require.Equal(t, 1, f.closed)
	})
}

func TestShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		boom := errors.New("boom")
		for _, want := range []error{nil, boom, lock.ErrClosed} {
			c, other := s.client(t), s.client(t)
			ctx := lock.WithOwner(t.Context(), c.NewOwner())
			h, err := c.Lock("orders").Lock(ctx)
			require.NoError(t, err)
			kept, err := c.Lock("kept").Lock(ctx, lock.AtLeast(time.Hour))
			require.NoError(t, err)
			require.NoError(t, kept.Unlock(ctx))
			waiting := make(chan error, 1)
			go func() { waiting <- c.Lock("orders").Do(t.Context(), nothing) }()
			synctest.Wait()

			bounded, cancel := context.WithTimeoutCause(t.Context(), time.Minute, boom)
			done := make(chan error, 1)
			go func() { done <- c.Shutdown(bounded) }()
			err = <-waiting
			require.ErrorIs(t, err, lock.ErrClosed)
			require.NotErrorIs(t, err, lock.ErrNotAcquired)
			time.Sleep(30 * time.Second)
			require.Empty(t, done)
			require.NoError(t, context.Cause(h.Context()))
			require.ErrorIs(t, c.Lock("new").Do(ctx, nothing), lock.ErrClosed)
			require.ErrorIs(t, c.Lock("orders").Do(t.Context(), nothing), lock.ErrClosed)
			require.NoError(t, c.Lock("orders").Do(ctx, nothing), "its owner can re-enter it")
			switch want {
			case nil:
				require.NoError(t, h.Unlock(ctx))
			case lock.ErrClosed:
				c.Close()
			}

			err = <-done
			require.ErrorIs(t, err, want)
			if want != nil {
				require.ErrorContains(t, err, "holds left: 1")
				require.ErrorIs(t, h.Unlock(ctx), lock.ErrClosed)
			}
			require.NoError(t, c.Shutdown(t.Context()))
			require.ErrorIs(t, c.Client.Lock("orders").UnlockOwner(ctx), lock.ErrClosed)
			require.Empty(t, c.Holds())
			for _, name := range []string{"orders", "kept"} {
				require.NoError(t, other.Lock(name).Do(t.Context(), nothing, lock.Wait(0)), name)
			}
			cancel()
		}
		var none context.Context
		require.ErrorIs(t, s.client(t).Shutdown(none), lock.ErrInvalid)
	})
}

func TestHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStore().client(t)
		require.Empty(t, c.Holds())
		h, err := c.RWLock("orders").Write().Lock(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		time.Sleep(time.Second)
		waiting := make(chan error, 1)
		go func() { waiting <- c.RWLock("orders").Read().Do(t.Context(), nothing) }()
		synctest.Wait()

		all := c.Holds()
		require.Len(t, all, 2)
		require.Equal(t, "memory-write", all[0].Kind)
		require.Equal(t, lock.OwnerOf(h).String(), all[0].Owner)
		require.Equal(t, time.Second, all[1].Since.Sub(all[0].Since))
		require.LessOrEqual(t, all[0].Remaining, 3*time.Second)
		require.Equal(t, "memory-read", all[1].Kind)
		for i, hold := range all {
			require.Equal(t, "orders", hold.Name)
			require.Equal(t, i == 1, hold.Waiting)
			require.Contains(t, hold.Site, "driver_test.TestHolds.")
		}
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-waiting)
		require.Empty(t, c.Holds())
	})
}

// A hold that its caller has dropped is logged, and released when its lease ends, for which no Shutdown waits. One of a
// named owner stays.
func TestDroppedHolds(t *testing.T) {
	drop := func(c client, ctx context.Context, name string) {
		_, err := c.Lock(name).Lock(ctx)
		require.NoError(t, err)
	}
	for _, ttl := range []time.Duration{time.Second, time.Hour} {
		var log log
		s := newStore()
		s.TTL = ttl
		c, other := s.client(t, log.option()), s.client(t)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		drop(c, t.Context(), "orders")
		drop(c, ctx, "owned")
		require.Eventually(t, func() bool {
			runtime.GC()
			return strings.Contains(log.String(), "dropped without Unlock")
		}, 10*time.Second, time.Millisecond)
		require.Contains(t, log.String(), "driver_test.TestDroppedHolds")
		require.ErrorIs(t, other.Lock("owned").Do(t.Context(), nothing, lock.Wait(0)), lock.ErrNotAcquired)
		if ttl == time.Second {
			require.NoError(t, other.Lock("orders").Do(t.Context(), nothing, lock.Wait(10*time.Second)))
		}
		require.NoError(t, c.Client.Lock("owned").UnlockOwner(ctx))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		require.NoError(t, c.Shutdown(ctx))
		cancel()
	}
}

// A call under a hold on the same lock logs that it waits for itself, and a permit under another does not.
func TestNestedCallsWarn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log log
		c := newStore().client(t, log.option())
		for range 2 {
			require.ErrorIs(t, c.Lock("orders").Do(t.Context(), func(ctx context.Context) error {
				return c.Lock("orders").Do(ctx, nothing, lock.Wait(time.Second))
			}), lock.ErrNotAcquired)
			require.NoError(t, c.Semaphore("orders", 2).Do(t.Context(), func(ctx context.Context) error {
				return c.Semaphore("orders", 2).Do(ctx, nothing)
			}))
		}
		require.Equal(t, 1, strings.Count(log.String(), "wait for itself"), log.String())
	})
}

// Lose of package redlatchtest works with every lock, and its release is that of the hold.
func TestLose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		c := s.client(t)
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		require.True(t, redlatchtest.Lose(t, h.Context(), lock.ReasonGone))
		require.Empty(t, s.Left("orders"))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

func TestOptions(t *testing.T) {
	for _, c := range []*driver.Client{
		newClient(t, nil), newClient(t, &fake{}, nil), newClient(t, &fake{}, driver.WithLogger(nil)),
	} {
		require.ErrorIs(t, c.Lock("orders").Do(t.Context(), nothing), lock.ErrInvalid)
		require.ErrorIs(t, c.RWLock("orders").Read().UnlockOwner(t.Context()), lock.ErrInvalid)
		require.ErrorIs(t, c.Semaphore("orders", 1).Do(t.Context(), nothing), lock.ErrInvalid)
		require.NoError(t, c.Shutdown(t.Context()))
	}
	c := newStore().client(t)
	require.ErrorIs(t, c.Lock(strings.Repeat("x", 2000)).Do(t.Context(), nothing), lock.ErrInvalid)
	require.Equal(t, c.ID()+":1", c.NewOwner().String())
}

func TestTelemetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewSpanRecorder()
		reader := sdkmetric.NewManualReader()
		c := newStore().client(t, driver.WithTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(spans))),
			driver.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
		require.NoError(t, c.Lock("orders").Do(t.Context(), nothing))
		_, err := c.Lock("orders").Lock(t.Context(), lock.MaxHold(time.Second))
		require.NoError(t, err)
		time.Sleep(2 * time.Second)

		var names []string
		for _, span := range spans.Ended() {
			names = append(names, span.Name())
		}
		require.Equal(t, []string{"redlatch.acquire", "redlatch.release", "redlatch.hold", "redlatch.acquire", "redlatch.hold"}, names)
		var all metricdata.ResourceMetrics
		require.NoError(t, reader.Collect(t.Context(), &all))
		var metrics []string
		for _, m := range all.ScopeMetrics[0].Metrics {
			metrics = append(metrics, m.Name)
		}
		require.Subset(t, metrics, []string{"redlatch.acquisitions", "redlatch.losses", "redlatch.holds", "redlatch.acquire.duration"})
	})
}

package system_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// recorder collects the spans and metrics of a client.
type recorder struct {
	t      *testing.T
	spans  *tracetest.InMemoryExporter
	tracer *trace.TracerProvider
	reader *metric.ManualReader
	meter  *metric.MeterProvider
}

func record(t *testing.T) *recorder {
	r := &recorder{t: t, spans: tracetest.NewInMemoryExporter(), reader: metric.NewManualReader()}
	r.tracer = trace.NewTracerProvider(trace.WithSyncer(r.spans))
	r.meter = metric.NewMeterProvider(metric.WithReader(r.reader))
	return r
}

func (r *recorder) options(more ...redlatch.Option) []redlatch.Option {
	return append(more, redlatch.WithTracerProvider(r.tracer), redlatch.WithMeterProvider(r.meter))
}

// under runs f in a span.
func (r *recorder) under(ctx context.Context, name string, f func(ctx context.Context)) {
	ctx, span := r.tracer.Tracer("test").Start(ctx, name)
	defer span.End()
	f(ctx)
}

// tree returns the ended spans in the order in which they began, one per line, indented
// under their parents.
func (r *recorder) tree() string {
	spans := r.spans.GetSpans()
	slices.SortStableFunc(spans, func(a, b tracetest.SpanStub) int { return a.StartTime.Compare(b.StartTime) })
	var b strings.Builder
	var print func(parent tracetest.SpanStub, depth int)
	print = func(parent tracetest.SpanStub, depth int) {
		for _, s := range spans {
			if s.Parent.SpanID() != parent.SpanContext.SpanID() {
				continue
			}
			fmt.Fprintf(&b, "%s%s%s", strings.Repeat("  ", depth), s.Name, printed(s.Attributes))
			for _, e := range s.Events {
				fmt.Fprintf(&b, " +%s%s", e.Name, printed(e.Attributes))
			}
			if s.Status.Code == codes.Error {
				b.WriteString(" FAILED")
			}
			b.WriteString("\n")
			print(s, depth+1)
		}
	}
	print(tracetest.SpanStub{}, 0)
	return b.String()
}

// printed returns the sorted attributes, without values that differ from run to run.
func printed(attrs []attribute.KeyValue) string {
	var all []string
	for _, a := range attrs {
		switch key := strings.TrimPrefix(string(a.Key), "redlatch."); key {
		case "owner", "remaining", "error":
			all = append(all, key)
		default:
			all = append(all, key+"="+a.Value.String())
		}
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return "{" + strings.Join(all, " ") + "}"
}

// measured returns the unit and the points of each metric by name.
func (r *recorder) measured() map[string]string {
	var data metricdata.ResourceMetrics
	require.NoError(r.t, r.reader.Collect(r.t.Context(), &data))
	all := map[string]string{}
	for _, scope := range data.ScopeMetrics {
		assert.Equal(r.t, "github.com/redlatch/redlatch", scope.Scope.Name)
		for _, m := range scope.Metrics {
			assert.NotEmpty(r.t, m.Description, m.Name)
			var points []string
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				kind := "gauge"
				if d.IsMonotonic {
					kind = "counter"
				}
				for _, p := range d.DataPoints {
					points = append(points, fmt.Sprintf("%s=%d", printed(p.Attributes.ToSlice()), p.Value))
				}
				all[m.Name] = kind + " " + m.Unit
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					points = append(points, fmt.Sprintf("%s=%d", printed(p.Attributes.ToSlice()), p.Count))
				}
				all[m.Name] = "histogram " + m.Unit
			}
			slices.Sort(points)
			all[m.Name] += " " + strings.Join(points, " ")
		}
	}
	return all
}

// recorded runs a test with a client whose spans and metrics are recorded, in virtual time.
func recorded(t *testing.T, test func(t *testing.T, s *harness.VirtualServer, c *redlatch.Client, r *recorder), opts ...redlatch.Option) {
	t.Helper()
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond // else spans begin at the same time
		r := record(t)
		test(t, s, s.Client(t, r.options(opts...)...), r)
	})
}

// waits acquires a lock in the background and releases it. It returns when all callers wait.
func waits(ctx context.Context, l lock.Locker, opts ...lock.Option) <-chan error {
	done := make(chan error, 1)
	time.Sleep(time.Millisecond) // else its span begins at the same time as the one before
	go func() { done <- l.Do(ctx, nothing, opts...) }()
	time.Sleep(time.Second)
	synctest.Wait()
	return done
}

func TestSpans(t *testing.T) {
	recorded(t, func(t *testing.T, s *harness.VirtualServer, c *redlatch.Client, r *recorder) {
		theirs := mustLock(t, s.Client(t).Lock("orders"), lock.Lease(time.Hour))
		r.under(t.Context(), "request", func(ctx context.Context) {
			first := waits(ctx, c.Lock("orders"), lock.Wait(3*time.Second))
			next := waits(ctx, c.Lock("orders"))
			require.ErrorIs(t, <-first, lock.ErrNotAcquired)
			time.Sleep(safetyPoll + time.Second)
			require.NoError(t, theirs.Unlock(t.Context()))
			require.NoError(t, <-next)
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=2 contended=true kind=lock name=orders outcome=not_acquired} +subscribed
  redlatch.acquire{attempts=3 contended=true kind=lock name=orders outcome=acquired} +woken{wake=local} +woken{wake=timer} +woken{wake=message}
  redlatch.hold{kind=lock name=orders owner}
    redlatch.release{kind=lock name=orders}
`, r.tree())

		r.spans.Reset()
		r.under(t.Context(), "request", func(ctx context.Context) {
			h, err := c.FencedLock("invoices").Lock(ctx)
			require.NoError(t, err)
			r.under(h.Context(), "work", func(context.Context) {})
			next := waits(ctx, c.FencedLock("invoices"))
			require.ErrorIs(t, second(c.FencedLock("invoices").TryLock(ctx)), lock.ErrNotAcquired)
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, <-next)
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=1 contended=false kind=fenced name=invoices outcome=acquired}
  redlatch.hold{kind=fenced name=invoices owner token=1}
    work
    redlatch.release{kind=fenced name=invoices}
  redlatch.acquire{attempts=1 contended=true kind=fenced name=invoices outcome=acquired} +subscribed +woken{wake=hand-off}
  redlatch.acquire{attempts=1 contended=true kind=fenced name=invoices outcome=not_acquired}
  redlatch.hold{kind=fenced name=invoices owner token=2}
    redlatch.release{kind=fenced name=invoices}
`, r.tree())
	})
}

// A fair lock passes from one waiter to the next. A writer admits readers, one of which has made the
// attempts for both. A permit is a hold if it has a lease. A wait for a latch is a span, whatever its
// outcome. A term is a hold whose token is that of the term. A run of once-only work is a hold with the name
// of the work; what finds the work done, and what only reads, has no span.
func TestSpansOfOtherKinds(t *testing.T) {
	recorded(t, func(t *testing.T, s *harness.VirtualServer, c *redlatch.Client, r *recorder) {
		other := s.Client(t)
		check := func(what string, during func(ctx context.Context), want string) {
			t.Helper()
			r.spans.Reset()
			r.under(t.Context(), what, during)
			require.Equal(t, what+"\n"+want, r.tree())
		}

		theirs := mustLock(t, other.FairLock("orders"), lock.Lease(time.Hour))
		check("fair lock", func(ctx context.Context) {
			first := waits(ctx, c.FairLock("orders"))
			next := waits(ctx, c.FairLock("orders"))
			require.NoError(t, theirs.Unlock(t.Context()))
			require.NoError(t, <-first)
			require.NoError(t, <-next)
		}, `  redlatch.acquire{attempts=3 contended=true kind=fair name=orders outcome=acquired} +subscribed +woken{wake=message}
  redlatch.acquire{attempts=1 contended=true kind=fair name=orders outcome=acquired} +woken{wake=hand-off}
  redlatch.hold{kind=fair name=orders owner}
    redlatch.release{kind=fair name=orders}
  redlatch.hold{kind=fair name=orders owner}
    redlatch.release{kind=fair name=orders}
`)

		theirs = mustLock(t, other.RWLock("catalogue").Write(), lock.Lease(time.Hour))
		check("readers", func(ctx context.Context) {
			first := waits(ctx, c.RWLock("catalogue").Read())
			next := waits(ctx, c.RWLock("catalogue").Read())
			require.NoError(t, theirs.Unlock(t.Context()))
			require.NoError(t, <-first)
			require.NoError(t, <-next)
		}, `  redlatch.acquire{attempts=3 contended=true kind=read name=catalogue outcome=acquired} +subscribed +woken{wake=message}
  redlatch.acquire{attempts=1 contended=false kind=read name=catalogue outcome=acquired}
  redlatch.hold{kind=read name=catalogue owner}
    redlatch.release{kind=read name=catalogue}
  redlatch.hold{kind=read name=catalogue owner}
    redlatch.release{kind=read name=catalogue}
`)
		check("writer", func(ctx context.Context) {
			require.NoError(t, c.RWLock("catalogue").Write().Do(ctx, nothing))
		}, `  redlatch.acquire{attempts=1 contended=false kind=write name=catalogue outcome=acquired}
  redlatch.hold{kind=write name=catalogue owner}
    redlatch.release{kind=write name=catalogue}
`)

		check("release that fails", func(ctx context.Context) {
			h, err := c.Lock("stuck").Lock(ctx)
			require.NoError(t, err)
			s.SetError("ERR a bug")
			require.ErrorContains(t, h.Unlock(ctx), "a bug")
			s.SetError("")
		}, `  redlatch.acquire{attempts=1 contended=false kind=lock name=stuck outcome=acquired}
  redlatch.hold{kind=lock name=stuck owner}
    redlatch.release{kind=lock name=stuck} FAILED
`)

		seats, leased := c.Semaphore("seats"), c.PermitSemaphore("leased")
		require.NoError(t, seats.AddPermits(t.Context(), 1))
		require.NoError(t, leased.AddPermits(t.Context(), 1))
		r.spans.Reset()
		require.NoError(t, seats.Acquire(t.Context(), 1))
		require.ErrorIs(t, seats.TryAcquire(t.Context(), 1), lock.ErrNotAcquired)
		require.NoError(t, seats.Release(t.Context(), 1))
		permit, err := leased.Acquire(t.Context(), 1)
		require.NoError(t, err)
		require.NoError(t, permit.Release(t.Context()))
		require.Equal(t, `redlatch.acquire{attempts=1 contended=false kind=semaphore name=seats outcome=acquired}
redlatch.acquire{attempts=1 contended=true kind=semaphore name=seats outcome=not_acquired}
redlatch.acquire{attempts=1 contended=false kind=permit-semaphore name=leased outcome=acquired}
redlatch.hold{kind=permit-semaphore name=leased permit=`+permit.ID()+`}
  redlatch.release{kind=permit-semaphore name=leased}
`, r.tree())

		check("latch", func(ctx context.Context) {
			require.NoError(t, c.CountDownLatch("import").Wait(ctx))
			require.NoError(t, second(other.CountDownLatch("import").TrySetCount(ctx, 1)))
			bounded, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			require.ErrorIs(t, c.CountDownLatch("import").Wait(bounded), context.DeadlineExceeded)
			require.NoError(t, s.Set("import", "one"))
			require.Error(t, c.CountDownLatch("import").Wait(ctx))
		}, `  redlatch.wait{attempts=1 kind=latch name=import outcome=open}
  redlatch.wait{attempts=2 kind=latch name=import outcome=not_open}
  redlatch.wait{attempts=1 kind=latch name=import outcome=error} FAILED
`)

		check("election", func(ctx context.Context) {
			e := c.Election("scheduler")
			term, err := e.Campaign(ctx, "host-7")
			require.NoError(t, err)
			r.under(term.Context(), "work", func(context.Context) {})
			require.ErrorIs(t, second(e.Campaign(ctx, "host-8", lock.Wait(0))), lock.ErrNotAcquired)
			require.NoError(t, second(e.Leader(ctx)))
			for range e.Observe(ctx) {
				break
			}
			require.NoError(t, term.Resign(ctx))
			term, err = e.Campaign(ctx, "host-7")
			require.NoError(t, err)
			require.True(t, s.Del("scheduler"))
			require.ErrorIs(t, term.Resign(ctx), lock.ErrLost)
		}, `  redlatch.acquire{attempts=1 contended=false kind=election name=scheduler outcome=acquired}
  redlatch.hold{kind=election name=scheduler owner token=1}
    work
    redlatch.release{kind=election name=scheduler}
  redlatch.acquire{attempts=1 contended=true kind=election name=scheduler outcome=not_acquired}
  redlatch.acquire{attempts=1 contended=false kind=election name=scheduler outcome=acquired}
  redlatch.hold{kind=election name=scheduler owner token=2} +lost{reason=gone from the server} FAILED
    redlatch.release{kind=election name=scheduler} FAILED
`)

		check("once", func(ctx context.Context) {
			for range 2 {
				require.NoError(t, second(c.Once("report").Run(ctx, "1", func(ctx context.Context) error {
					r.under(ctx, "work", func(context.Context) {})
					return nil
				})))
			}
		}, `  redlatch.acquire{attempts=1 contended=false kind=once name=report outcome=acquired}
  redlatch.hold{kind=once name=report owner}
    work
    redlatch.release{kind=once name=report}
`)
	})
}

// Groups of locks have their own spans, with those of their members inside.
func TestSpansOfGroups(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) { // in virtual time several begin at once
		r := record(t)
		c := harness.Client(t, s, r.options()...)
		tryInside := func(l lock.Locker) func(ctx context.Context) {
			return func(ctx context.Context) {
				require.NoError(t, l.Do(ctx, func(ctx context.Context) error {
					require.ErrorIs(t, second(l.TryLock(ctx)), lock.ErrNotAcquired)
					return nil
				}))
			}
		}
		r.under(t.Context(), "request", tryInside(c.MultiLock(c.Lock("b"), c.Lock("a"), c.FencedLock("c"))))
		require.Equal(t, `request
  redlatch.acquire{attempts=1 contended=false kind=multi name=b,a,c outcome=acquired}
    redlatch.hold{kind=lock name=a owner}
      redlatch.release{kind=lock name=a}
    redlatch.hold{kind=lock name=b owner}
      redlatch.release{kind=lock name=b}
    redlatch.acquire{attempts=1 contended=false kind=fenced name=c outcome=acquired}
    redlatch.hold{kind=fenced name=c owner token=1}
      redlatch.release{kind=fenced name=c}
  redlatch.hold{kind=multi name=b,a,c}
    redlatch.acquire{attempts=1 contended=true kind=multi name=b,a,c outcome=not_acquired}
    redlatch.release{kind=multi name=b,a,c}
`, r.tree())

		r.spans.Reset()
		r.under(t.Context(), "request", tryInside(c.RedLock([]lock.Locker{c.Lock("orders")})))
		var ordered strings.Builder
		for line := range strings.Lines(r.tree()) {
			if !strings.Contains(line, "kind=lock") { // their order varies
				ordered.WriteString(line)
			}
		}
		require.Equal(t, `request
  redlatch.acquire{attempts=1 contended=false kind=red name=orders outcome=acquired}
  redlatch.hold{kind=red name=orders}
    redlatch.acquire{attempts=1 contended=true kind=red name=orders outcome=not_acquired}
    redlatch.release{kind=red name=orders}
`, ordered.String())
	})
}

func TestSpansOfFailures(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		r := record(t)
		c := harness.Client(t, s, r.options(redlatch.WithWatchdogTimeout(timeout))...)
		gone := mustLock(t, c.Lock("gone"))
		harness.Do(t, s.Addr, "DEL", "gone")
		<-gone.Context().Done()
		require.ErrorIs(t, gone.Unlock(t.Context()), lock.ErrLost)
		stuck := mustLock(t, c.Lock("stuck"))
		s.Kill()
		<-stuck.Context().Done()
		require.ErrorIs(t, stuck.Unlock(t.Context()), lock.ErrLost)
		require.Error(t, second(c.Lock("stuck").TryLock(t.Context())))

		require.NoError(t, s.Restart())
		harness.Eventually(t, 10*time.Second, "the connection is back", func() bool { return c.Ping(t.Context()) == nil })
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "1000")
		require.ErrorIs(t, second(c.Lock("late").Lock(t.Context(), lock.Wait(100*time.Millisecond))), lock.ErrIndeterminate)

		harness.Eventually(t, 5*time.Second, "all spans have ended", func() bool { return len(r.spans.GetSpans()) == 6 })
		lines := strings.Split(r.tree(), "\n")
		assert.Equal(t, "redlatch.acquire{attempts=1 contended=false kind=lock name=late outcome=indeterminate} FAILED", lines[5])
		assert.Equal(t, "redlatch.hold{kind=lock name=gone owner} +lost{reason=gone from the server} FAILED", lines[1])
		assert.Regexp(t, `^redlatch\.hold\{kind=lock name=stuck owner\}( \+renewal failed\{error remaining\})+ \+lost\{reason=lease expired\} FAILED$`, lines[3])
		assert.Regexp(t, `^redlatch\.acquire\{attempts=1 contended=false kind=lock name=stuck outcome=(unavailable|indeterminate)\} FAILED$`, lines[4])
	})
}

// Exporters refuse a batch of spans with a text that is not valid UTF-8, and no text is very long, whatever the
// names are and the server says.
func TestSpansOfOddNames(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		var log harness.Log
		c := harness.Client(t, s, r.options(
			redlatch.WithMetricName(func(name string) string { return name }), redlatch.WithLogger(slog.New(slog.NewJSONHandler(&log, nil))),
		)...)
		const wait = 500 * time.Millisecond // for an attempt on a busy machine
		for _, name := range []string{"\xff\xfe", "a\x00\x1b[2J", strings.Repeat("x", 100_000)} {
			harness.Do(t, s.Addr, "SET", name+" string", name)
			for _, l := range []lock.Locker{
				c.Lock(name), c.FairLock(name), c.RWLock(name).Write(), c.PlainLock(name), c.MultiLock(c.Lock(name), c.Lock(name+"2")),
				c.RedLock([]lock.Locker{c.Lock(name)}),
			} {
				require.NoError(t, l.Do(t.Context(), nothing))
			}
			require.Error(t, c.Lock(name+" string").Do(t.Context(), nothing))
			require.Error(t, c.Semaphore(name+" string").TryAcquire(t.Context(), 1))
			harness.Do(t, s.Addr, "HSET", name+" endless", c.NewOwner().String(), "1")
			require.Error(t, c.Lock(name+" endless").Do(t.Context(), nothing, lock.Wait(wait)))
			require.Error(t, c.Semaphore(name+" missing").Acquire(t.Context(), 1, lock.Wait(wait)))
			require.Error(t, c.Lock(name).Do(t.Context(), func(ctx context.Context) error {
				return c.Lock(name).Do(ctx, nothing, lock.Wait(wait)) // by mistake
			}))
			require.NoError(t, second(c.Once(name).Run(t.Context(), name, nothing)))
			term, err := c.Election(name).Campaign(t.Context(), name)
			require.NoError(t, err)
			require.NoError(t, term.Resign(t.Context()))
		}
		valid := func(text string) {
			require.True(t, utf8.ValidString(text), "%.80q", text)
			require.Less(t, len(text), 2000, "%.80q", text)
		}
		var spans int
		for _, span := range r.spans.GetSpans() {
			spans++
			valid(span.Name)
			valid(span.Status.Description)
			for _, a := range span.Attributes {
				valid(a.Value.String())
			}
			for _, e := range span.Events {
				for _, a := range e.Attributes {
					valid(a.Value.String())
				}
			}
		}
		require.Greater(t, spans, 3*8)
		for _, warning := range []string{"a key without an expiry", "a semaphore that does not exist", "under a hold on the same lock"} {
			require.Contains(t, log.String(), warning)
		}
		var all metricdata.ResourceMetrics
		require.NoError(t, r.reader.Collect(t.Context(), &all))
		metrics, err := json.Marshal(all)
		require.NoError(t, err)
		for _, text := range []string{log.String(), string(metrics)} {
			require.NotContains(t, text, `\ufffd`) // what is written for a byte that is not valid
			require.NotContains(t, text, strings.Repeat("x", 2000))
		}
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

func TestMetrics(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		r := record(t)
		c := harness.Client(t, s, r.options(redlatch.WithWatchdogTimeout(timeout))...)
		h := mustLock(t, c.Lock("orders"))
		waiter := harness.StartLock(t, t.Context(), c.Lock("orders"))
		harness.Waits(t, 1, c)
		require.ErrorIs(t, second(c.FencedLock("orders").TryLock(t.Context())), lock.ErrNotAcquired)
		harness.Eventually(t, 5*time.Second, "a renewal", func() bool { return r.measured()["redlatch.renewal.remaining"] != "" })
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, waiter.Got().Unlock(t.Context()))

		doomed := mustLock(t, c.Lock("doomed"))
		other := harness.Client(t, s)
		harness.Eventually(t, 10*time.Second, "an expiry that wakes a waiter", func() bool { // unless it precedes the wait
			theirs := mustLock(t, other.Lock("theirs"), lock.Lease(100*time.Millisecond))
			require.NoError(t, c.Lock("theirs").Do(t.Context(), nothing))
			require.ErrorIs(t, theirs.Unlock(t.Context()), lock.ErrLost)
			return r.measured()["redlatch.polls"] != ""
		})
		s.Kill()
		harness.Eventually(t, 10*time.Second, "a loss", func() bool { return r.measured()["redlatch.losses"] != "" })
		require.ErrorIs(t, doomed.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, s.Restart())
		theirs := mustLock(t, harness.Client(t, s).Lock("theirs"))
		defer func() { require.NoError(t, theirs.Unlock(t.Context())) }()
		harness.Eventually(t, 20*time.Second, "a new subscriber connection", func() bool {
			_ = c.Lock("theirs").Do(t.Context(), nothing, lock.Wait(100*time.Millisecond))
			return r.measured()["redlatch.hub.reconnects"] != ""
		})

		got := r.measured()
		for name, want := range map[string]string{
			"redlatch.acquisitions":      `^counter {acquisition} {kind=fenced outcome=not_acquired}=1 {kind=lock outcome=acquired}=\d+`,
			"redlatch.acquire.duration":  `^histogram s {kind=fenced outcome=not_acquired}=1 {kind=lock outcome=acquired}=\d+`,
			"redlatch.hold.duration":     `^histogram s {kind=lock}=\d+$`,
			"redlatch.holds":             `^gauge {hold} {kind=lock}=0$`,
			"redlatch.waiters":           `^gauge {waiter} {kind=fenced}=0 {kind=lock}=0$`,
			"redlatch.losses":            `^counter {hold} {kind=lock reason=lease expired}=1$`,
			"redlatch.handoffs":          `^counter {handoff} {kind=lock}=1$`,
			"redlatch.polls":             `^counter {attempt} {kind=lock}=\d+$`,
			"redlatch.hub.reconnects":    `^counter {reconnect} =[1-9]\d*$`,
			"redlatch.renewal.remaining": `^histogram s =\d+$`,
			"redlatch.renewal.failures":  `^counter {batch} =[1-9]\d*$`,
		} {
			assert.Regexp(t, want, got[name], name)
			delete(got, name)
		}
		assert.Empty(t, got, "metrics without an expectation")
	})
}

// All kinds have metrics. Heartbeats are neither polls nor renewals, and names are optional.
func TestMetricsOfOtherKinds(t *testing.T) {
	template := redlatch.WithMetricName(func(name string) string {
		template, _, _ := strings.Cut(name, ":")
		return strings.TrimPrefix(template, "private")
	})
	recorded(t, func(t *testing.T, s *harness.VirtualServer, c *redlatch.Client, r *recorder) {
		check := func(want map[string]string) {
			t.Helper()
			got := r.measured()
			for name, want := range want {
				assert.Equal(t, want, got["redlatch."+name], name)
			}
		}

		h := mustLock(t, c.FairLock("order:1"), lock.Lease(time.Hour))
		next := waits(t.Context(), c.FairLock("order:1"), lock.Lease(time.Hour))
		s.Reset()
		time.Sleep(safetyPoll - 2*time.Second)
		require.Equal(t, 1, s.Calls("evalsha"), "the heartbeat")
		check(map[string]string{"waiters": "gauge {waiter} {kind=fair name=order}=1", "renewal.remaining": "", "polls": ""})
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-next)

		// All readers that are next enter when a writer leaves.
		rw := c.RWLock("private")
		h = mustLock(t, rw.Write(), lock.Lease(time.Hour))
		first, next := waits(t.Context(), rw.Read()), waits(t.Context(), rw.Read())
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-first)
		require.NoError(t, <-next)
		h = mustLock(t, rw.Read())

		term, err := c.Election("scheduler").Campaign(t.Context(), "")
		require.NoError(t, err)
		check(map[string]string{"holds": "gauge {hold} {kind=election name=scheduler}=1 {kind=fair name=order}=0 {kind=read}=1 {kind=write}=0"})
		require.NoError(t, term.Resign(t.Context()))
		for range 2 {
			require.NoError(t, second(c.Once("report").Run(t.Context(), "1", nothing)))
		}
		theirs := mustLock(t, s.Client(t).Lock("order:3"), lock.Lease(time.Second))
		require.NoError(t, c.Lock("order:3").Do(t.Context(), nothing)) // woken by the expiry
		require.ErrorIs(t, theirs.Unlock(t.Context()), lock.ErrLost)

		check(map[string]string{
			"acquisitions": "counter {acquisition} {kind=election name=scheduler outcome=acquired}=1 {kind=fair name=order outcome=acquired}=2 " +
				"{kind=lock name=order outcome=acquired}=1 {kind=once name=report outcome=acquired}=1 " +
				"{kind=read outcome=acquired}=3 {kind=write outcome=acquired}=1",
			"waiters": "gauge {waiter} {kind=election name=scheduler}=0 {kind=fair name=order}=0 {kind=lock name=order}=0 " +
				"{kind=once name=report}=0 {kind=read}=0 {kind=write}=0",
			"hold.duration": "histogram s {kind=election name=scheduler}=1 {kind=fair name=order}=2 {kind=lock name=order}=1 " +
				"{kind=once name=report}=1 {kind=read}=2 {kind=write}=1",
			"handoffs": "counter {handoff} {kind=fair name=order}=1",
			"polls":    "counter {attempt} {kind=lock name=order}=1",
		})
		require.NoError(t, h.Unlock(t.Context()))
	}, template)
}

// The documentation lists everything that the code emits.
func TestTelemetryIsDocumented(t *testing.T) {
	source, err := os.ReadFile("../telemetry/telemetry.go")
	require.NoError(t, err)
	doc, err := os.ReadFile("../../docs/reference/metrics.md")
	require.NoError(t, err)
	names := 0
	for quoted := range strings.SplitSeq(string(source), `"`) {
		if strings.HasPrefix(quoted, "redlatch.") {
			names++
			assert.Contains(t, string(doc), "`"+quoted+"`")
		}
	}
	assert.Greater(t, names, 20)
}

// fussy is a processor of spans that panics when the span of a hold starts.
type fussy struct {
	trace.SpanProcessor
	armed atomic.Bool
}

func (f *fussy) OnStart(_ context.Context, span trace.ReadWriteSpan) {
	if span.Name() == "redlatch.hold" && f.armed.Load() {
		panic("a bug")
	}
}

func (*fussy) OnEnd(trace.ReadOnlySpan) {}

// A panic of the program's telemetry in Lock leaves nothing behind, neither of a lock nor of a re-entry.
func TestTelemetryThatPanics(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var f fussy
		c := harness.Client(t, s, redlatch.WithTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(&f))))
		owner := lock.WithOwner(t.Context(), c.NewOwner())
		for _, l := range []lock.Locker{c.Lock("lock"), c.FairLock("fair"), c.RWLock("rw").Read(), c.RWLock("rw").Write()} {
			for _, reenters := range []bool{false, true} {
				var held lock.Hold
				if reenters {
					var err error
					held, err = l.Lock(owner)
					require.NoError(t, err)
				}
				f.armed.Store(true)
				require.Panics(t, func() { _, _ = l.Lock(owner) })
				f.armed.Store(false)
				if reenters {
					require.NoError(t, held.Unlock(t.Context()))
				}
				require.NoError(t, l.Do(t.Context(), nothing, lock.Wait(5*time.Second)), l.Name())
			}
		}
		harness.NothingLeft(t, s.Addr)
	})
}

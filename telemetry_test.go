package redlatch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
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

func TestSpans(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		c, conn := harness.Client(t, s, r.options()...), harness.Conn(t, s.Addr)
		work := func(ctx context.Context) error {
			r.under(ctx, "work", func(context.Context) {})
			return nil
		}

		// Woken by a message, then by a hand-off.
		require.NoError(t, c.Lock("warm").Do(lock.WithOwner(t.Context(), c.NewOwner()), nothing))
		require.NoError(t, c.Lock("warm").Do(t.Context(), nothing))
		r.spans.Reset()
		theirs, err := harness.Client(t, s).Lock("orders").Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		done := make(chan error, 2)
		r.under(t.Context(), "request", func(ctx context.Context) {
			go func() { done <- c.Lock("orders").Do(ctx, work) }()
			waitForWaiters(t, conn, 1, 2, c)
			require.NoError(t, theirs.Unlock(t.Context()))
			require.NoError(t, <-done)
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=3 contended=true kind=lock name=orders outcome=acquired} +subscribed +woken{wake=message}
  redlatch.hold{kind=lock name=orders owner}
    work
    redlatch.release{kind=lock name=orders}
`, r.tree())

		r.spans.Reset()
		r.under(t.Context(), "request", func(ctx context.Context) {
			h, err := c.FencedLock("invoices").Lock(ctx)
			require.NoError(t, err)
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			go func() { done <- c.FencedLock("invoices").Do(ctx, nothing) }()
			waitForWaiters(t, conn, 1, 1, c) // after it has subscribed
			_, err = c.FencedLock("invoices").TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, <-done)
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=1 contended=false kind=fenced name=invoices outcome=acquired}
  redlatch.hold{kind=fenced name=invoices owner token=1}
    redlatch.release{kind=fenced name=invoices}
  redlatch.acquire{attempts=1 contended=true kind=fenced name=invoices outcome=acquired} +subscribed +woken{wake=hand-off}
  redlatch.acquire{attempts=1 contended=true kind=fenced name=invoices outcome=not_acquired}
  redlatch.hold{kind=fenced name=invoices owner token=2}
    redlatch.release{kind=fenced name=invoices}
`, r.tree())
	})
}

// A fair lock passes from one waiter to the next. A writer admits readers, one of which
// has made the attempts for both.
func TestSpansOfOtherKinds(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		c, conn := harness.Client(t, s, r.options()...), harness.Conn(t, s.Addr)
		other := harness.Client(t, s)
		done := make(chan error, 2)

		theirs, err := other.FairLock("orders").Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		r.under(t.Context(), "request", func(ctx context.Context) {
			entered, release := make(chan struct{}), make(chan struct{})
			go func() {
				done <- c.FairLock("orders").Do(ctx, func(context.Context) error {
					close(entered)
					<-release
					return nil
				})
			}()
			waitForWaiters(t, conn, 1, 2, c) // on arrival and after it has subscribed
			require.NoError(t, theirs.Unlock(t.Context()))
			<-entered
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			go func() { done <- c.FairLock("orders").Do(ctx, nothing) }()
			waitForWaiters(t, conn, 1, 1, c) // on arrival; no message arrives while this process holds the lock
			close(release)
			require.NoError(t, <-done)
			require.NoError(t, <-done)
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=3 contended=true kind=fair name=orders outcome=acquired} +subscribed +woken{wake=message}
  redlatch.hold{kind=fair name=orders owner}
    redlatch.release{kind=fair name=orders}
  redlatch.acquire{attempts=1 contended=true kind=fair name=orders outcome=acquired} +woken{wake=hand-off}
  redlatch.hold{kind=fair name=orders owner}
    redlatch.release{kind=fair name=orders}
`, r.tree())

		require.NoError(t, c.RWLock("catalogue").Read().Do(t.Context(), nothing)) // loads the scripts
		r.spans.Reset()
		theirs, err = other.RWLock("catalogue").Write().Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		r.under(t.Context(), "request", func(ctx context.Context) {
			go func() { done <- c.RWLock("catalogue").Read().Do(ctx, nothing) }()
			waitForWaiters(t, conn, 1, 2, c)
			go func() { done <- c.RWLock("catalogue").Read().Do(ctx, nothing) }()
			waitForWaiters(t, conn, 2, 2, c)
			require.NoError(t, theirs.Unlock(t.Context()))
			require.NoError(t, <-done)
			require.NoError(t, <-done)
			require.NoError(t, c.RWLock("catalogue").Write().Do(ctx, nothing))
		})
		tree := r.tree()
		for _, line := range []string{
			"redlatch.acquire{attempts=3 contended=true kind=read name=catalogue outcome=acquired} +subscribed +woken{wake=message}",
			"redlatch.acquire{attempts=1 contended=false kind=read name=catalogue outcome=acquired}",
			"redlatch.acquire{attempts=1 contended=false kind=write name=catalogue outcome=acquired}",
			"redlatch.hold{kind=write name=catalogue owner}\n    redlatch.release{kind=write name=catalogue}",
		} {
			assert.Contains(t, tree, "  "+line+"\n")
		}
		assert.Equal(t, 2, strings.Count(tree, "  redlatch.hold{kind=read name=catalogue owner}\n    redlatch.release{kind=read name=catalogue}\n"), tree)
	})
}

// Groups of locks have their own spans, with those of their members inside.
func TestSpansOfGroups(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		c := harness.Client(t, s, r.options()...)
		r.under(t.Context(), "request", func(ctx context.Context) {
			both := c.MultiLock(c.Lock("b"), c.Lock("a"), c.FencedLock("c"))
			require.NoError(t, both.Do(ctx, func(ctx context.Context) error {
				r.under(ctx, "work", func(context.Context) {})
				_, err := both.TryLock(ctx)
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				return nil
			}))
		})
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
    work
    redlatch.acquire{attempts=1 contended=true kind=multi name=b,a,c outcome=not_acquired}
    redlatch.release{kind=multi name=b,a,c}
`, r.tree())

		r.spans.Reset()
		members := []lock.Locker{c.Lock("orders")}
		for range 2 {
			members = append(members, harness.Client(t, harness.Own(t, s.Program), r.options()...).Lock("orders"))
		}
		r.under(t.Context(), "request", func(ctx context.Context) {
			red := c.RedLock(members...)
			require.NoError(t, red.Do(ctx, func(ctx context.Context) error {
				_, err := red.TryLock(ctx)
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				return nil
			}))
		})
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

// A wait is a span, whatever its outcome.
func TestSpansOfWaits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		c, other := harness.Client(t, s, r.options()...), harness.Client(t, s).CountDownLatch("import")
		conn := harness.Conn(t, s.Addr)
		r.under(t.Context(), "request", func(ctx context.Context) {
			require.NoError(t, c.CountDownLatch("import").Wait(ctx))
			_, err := other.TrySetCount(ctx, 1)
			require.NoError(t, err)
			bounded, cancel := context.WithCancel(ctx)
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			done := make(chan error, 1)
			go func() { done <- c.CountDownLatch("import").Wait(bounded) }()
			waitForListeners(t, c, 1)
			harness.Eventually(t, patience, "two reads", func() bool {
				return harness.Commands(t, conn)["evalsha"] == 2 && c.Stats().Background == 0
			})
			cancel()
			require.ErrorIs(t, <-done, context.Canceled)
			harness.Do(t, s.Addr, "SET", "import", "one")
			require.Error(t, c.CountDownLatch("import").Wait(ctx))
		})
		require.Equal(t, `request
  redlatch.wait{attempts=1 kind=latch name=import outcome=open}
  redlatch.wait{attempts=2 kind=latch name=import outcome=not_open}
  redlatch.wait{attempts=1 kind=latch name=import outcome=error} FAILED
`, r.tree())
	})
}

// A term is a hold whose token is that of the term. A run of once-only work is a hold with the name of
// the work; what finds the work done, and what only reads, has no span.
func TestSpansOfElectionsAndOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		c := harness.Client(t, s, r.options()...)
		r.under(t.Context(), "request", func(ctx context.Context) {
			e := c.Election("scheduler")
			for range 2 {
				term, err := e.Campaign(ctx, "host-7")
				require.NoError(t, err)
				r.under(term.Context(), "work", func(context.Context) {})
				_, err = e.Campaign(ctx, "host-8", lock.Wait(0))
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				_, err = e.Leader(ctx)
				require.NoError(t, err)
				for range e.Observe(ctx) {
					break
				}
				require.NoError(t, term.Resign(ctx))
			}
			for _, ran := range []bool{true, false} {
				got, err := c.Once("report").Run(ctx, "1", func(ctx context.Context) error {
					r.under(ctx, "work", func(context.Context) {})
					return nil
				})
				require.NoError(t, err)
				require.Equal(t, ran, got)
			}
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=1 contended=false kind=election name=scheduler outcome=acquired}
  redlatch.hold{kind=election name=scheduler owner token=1}
    work
    redlatch.release{kind=election name=scheduler}
  redlatch.acquire{attempts=1 contended=true kind=election name=scheduler outcome=not_acquired}
  redlatch.acquire{attempts=1 contended=false kind=election name=scheduler outcome=acquired}
  redlatch.hold{kind=election name=scheduler owner token=2}
    work
    redlatch.release{kind=election name=scheduler}
  redlatch.acquire{attempts=1 contended=true kind=election name=scheduler outcome=not_acquired}
  redlatch.acquire{attempts=1 contended=false kind=once name=report outcome=acquired}
  redlatch.hold{kind=once name=report owner}
    work
    redlatch.release{kind=once name=report}
`, r.tree())

		r.spans.Reset()
		term, err := c.Election("scheduler").Campaign(t.Context(), "")
		require.NoError(t, err)
		harness.Do(t, s.Addr, "DEL", "scheduler")
		require.ErrorIs(t, term.Resign(t.Context()), lock.ErrLost)
		require.Equal(t, `redlatch.acquire{attempts=1 contended=false kind=election name=scheduler outcome=acquired}
redlatch.hold{kind=election name=scheduler owner token=3} +lost{reason=gone from the server} FAILED
  redlatch.release{kind=election name=scheduler} FAILED
`, r.tree())
	})
}

func TestSpansOfPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		c := harness.Client(t, s, r.options()...)
		seats, leased := c.Semaphore("seats"), c.PermitSemaphore("leased")
		_, err := seats.TrySetPermits(t.Context(), 1)
		require.NoError(t, err)
		_, err = leased.TrySetPermits(t.Context(), 1)
		require.NoError(t, err)
		var id string
		r.under(t.Context(), "request", func(ctx context.Context) {
			require.NoError(t, seats.Acquire(ctx, 1))
			require.ErrorIs(t, seats.TryAcquire(ctx, 1), lock.ErrNotAcquired)
			require.NoError(t, seats.Release(ctx, 1))
			permit, err := leased.Acquire(ctx)
			require.NoError(t, err)
			require.NoError(t, permit.Release(ctx))
			id = permit.ID()
		})
		require.Equal(t, `request
  redlatch.acquire{attempts=1 contended=false kind=semaphore name=seats outcome=acquired}
  redlatch.acquire{attempts=1 contended=true kind=semaphore name=seats outcome=not_acquired}
  redlatch.acquire{attempts=1 contended=false kind=permit-semaphore name=leased outcome=acquired}
  redlatch.hold{kind=permit-semaphore name=leased permit=`+id+`}
    redlatch.release{kind=permit-semaphore name=leased}
`, r.tree())
	})
}

func TestSpansOfFailures(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		r := record(t)
		c := harness.Client(t, s, r.options(redlatch.WithWatchdogTimeout(timeout))...)
		gone, err := c.Lock("gone").Lock(t.Context())
		require.NoError(t, err)
		harness.Do(t, s.Addr, "DEL", "gone")
		<-gone.Context().Done()
		require.ErrorIs(t, gone.Unlock(t.Context()), lock.ErrLost)
		stuck, err := c.Lock("stuck").Lock(t.Context())
		require.NoError(t, err)
		s.Kill()
		<-stuck.Context().Done()
		require.ErrorIs(t, stuck.Unlock(t.Context()), lock.ErrLost)
		_, err = c.Lock("stuck").TryLock(t.Context())
		require.Error(t, err)

		require.NoError(t, s.Restart())
		harness.Eventually(t, 10*time.Second, "the connection is back", func() bool { return c.Ping(t.Context()) == nil })
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "1000")
		_, err = c.Lock("late").Lock(t.Context(), lock.Wait(100*time.Millisecond)) // its outcome is unknown
		require.ErrorIs(t, err, lock.ErrIndeterminate)

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
		var logged textHandler
		c := harness.Client(t, s, r.options(
			redlatch.WithMetricName(func(name string) string { return name }), redlatch.WithLogger(slog.New(&logged)),
		)...)
		nothing := func(context.Context) error { return nil }
		const wait = 500 * time.Millisecond // for an attempt on a busy machine
		for _, name := range []string{"\xff\xfe", "a\x00\x1b[2J", strings.Repeat("x", 100_000)} {
			harness.Do(t, s.Addr, "SET", name+" string", name)
			for _, l := range []lock.Locker{
				c.Lock(name), c.FairLock(name), c.RWLock(name).Write(), c.PlainLock(name), c.MultiLock(c.Lock(name), c.Lock(name+"2")),
				c.RedLock(c.Lock(name)),
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
		lines := logged.texts()
		for _, text := range lines {
			valid(text)
		}
		for _, warning := range []string{"a key without an expiry", "a semaphore that does not exist", "under a hold on the same lock"} {
			require.Contains(t, strings.Join(lines, "\n"), warning)
		}
		var all metricdata.ResourceMetrics
		require.NoError(t, r.reader.Collect(t.Context(), &all))
		text, err := json.Marshal(all)
		require.NoError(t, err)
		require.NotContains(t, string(text), `\ufffd`) // what json writes for a byte that is not valid
		require.NotContains(t, string(text), strings.Repeat("x", 2000))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// textHandler keeps the texts of log records.
type textHandler struct {
	mu  sync.Mutex
	all []string
}

func (h *textHandler) texts() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.all)
}

func (h *textHandler) Handle(_ context.Context, r slog.Record) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, r.Message)
	r.Attrs(func(a slog.Attr) bool {
		h.all = append(h.all, a.Value.String())
		return true
	})
	return nil
}

func (*textHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h *textHandler) WithAttrs([]slog.Attr) slog.Handler     { return h }
func (h *textHandler) WithGroup(string) slog.Handler          { return h }

// The documentation lists everything that the code emits.
func TestTelemetryIsDocumented(t *testing.T) {
	source, err := os.ReadFile("internal/telemetry/telemetry.go")
	require.NoError(t, err)
	doc, err := os.ReadFile("docs/reference/metrics.md")
	require.NoError(t, err)
	names := 0
	for _, quoted := range strings.Split(string(source), `"`) {
		if strings.HasPrefix(quoted, "redlatch.") {
			names++
			assert.Contains(t, string(doc), "`"+quoted+"`")
		}
	}
	assert.Greater(t, names, 20)
}

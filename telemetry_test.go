package redlatch_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestTelemetry(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		spans := tracetest.NewInMemoryExporter()
		tracers := trace.NewTracerProvider(trace.WithSyncer(spans))
		reader := metric.NewManualReader()
		meters := metric.NewMeterProvider(metric.WithReader(reader))
		c := harness.Client(t, s, redlatch.WithTracerProvider(tracers), redlatch.WithMeterProvider(meters))

		require.NoError(t, c.FencedLock("orders").Do(t.Context(), func(ctx context.Context) error {
			_, work := tracers.Tracer("test").Start(ctx, "work")
			work.End()
			return nil
		}))
		h, err := c.Lock("orders").Lock(t.Context(), lock.Lease(50*time.Millisecond))
		require.NoError(t, err)
		_, err = c.Lock("orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		<-h.Context().Done()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		// The span of a lost hold ends in the background.
		harness.Eventually(t, 5*time.Second, "all spans have ended", func() bool { return len(spans.GetSpans()) == 7 })
		byName := map[string][]tracetest.SpanStub{}
		for _, span := range spans.GetSpans() {
			byName[span.Name] = append(byName[span.Name], span)
		}
		require.Len(t, byName["redlatch.acquire"], 3)
		require.Len(t, byName["redlatch.hold"], 2)
		require.Len(t, byName["redlatch.release"], 1)
		work := byName["work"][0]
		require.Equal(t, byName["redlatch.hold"][0].SpanContext.SpanID(), work.Parent.SpanID(), "work nests in the hold")
		require.Len(t, byName["redlatch.hold"][1].Events, 1)
		require.Equal(t, "lost", byName["redlatch.hold"][1].Events[0].Name)

		var data metricdata.ResourceMetrics
		require.NoError(t, reader.Collect(t.Context(), &data))
		sums := map[string]int64{}
		units := map[string]string{}
		for _, scope := range data.ScopeMetrics {
			for _, m := range scope.Metrics {
				units[m.Name] = m.Unit
				switch d := m.Data.(type) {
				case metricdata.Sum[int64]:
					for _, p := range d.DataPoints {
						sums[m.Name] += p.Value
					}
				case metricdata.Histogram[float64]:
					for _, p := range d.DataPoints {
						sums[m.Name] += int64(p.Count)
					}
				}
			}
		}
		assert.Equal(t, int64(3), sums["redlatch.acquisitions"])
		assert.Equal(t, int64(3), sums["redlatch.acquire.duration"])
		assert.Equal(t, int64(2), sums["redlatch.hold.duration"])
		assert.Equal(t, int64(1), sums["redlatch.losses"])
		assert.Zero(t, sums["redlatch.holds"])
		assert.Zero(t, sums["redlatch.waiters"])
		assert.Equal(t, "s", units["redlatch.acquire.duration"])
	})
}

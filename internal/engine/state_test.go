package engine_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// newLoss returns a loss, different from all others.
func newLoss() *lock.LostError {
	return &lock.LostError{Name: "orders", Reason: lock.ReasonExpired, When: time.Now()}
}

// ended calls onEnd for each span that has ended.
type ended struct {
	sdktrace.SpanProcessor
	onEnd func(span sdktrace.ReadOnlySpan)
}

func (e ended) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (e ended) OnEnd(span sdktrace.ReadOnlySpan)                { e.onEnd(span) }

// traced makes a hold held, and calls onEnd for its spans.
func traced(t testing.TB, s *engine.State, onEnd func(span sdktrace.ReadOnlySpan)) {
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(ended{onEnd: onEnd}))
	tel, err := telemetry.New(provider, nil, nil)
	require.NoError(t, err)
	s.Begin(tel.StartHold(t.Context(), telemetry.Lock{Kind: "lock", Name: "orders"}, lock.Owner{}, "", 0))
}

// The span of a lost hold ends in the background, or by the caller if there is none any more.
// Its exporter can use the hold.
func TestEndSpan(t *testing.T) {
	for _, closed := range []bool{false, true} {
		var s engine.State
		var spans []sdktrace.ReadOnlySpan
		traced(t, &s, func(span sdktrace.ReadOnlySpan) {
			require.False(t, s.Held())
			spans = append(spans, span)
		})
		require.True(t, s.Lose(newLoss()))
		var later []func(context.Context)
		s.EndSpan(func(f func(context.Context)) bool {
			if !closed {
				later = append(later, f)
			}
			return !closed
		})
		require.Equal(t, closed, len(spans) == 1)
		for _, f := range later {
			f(t.Context())
		}
		require.Len(t, spans, 1)
		require.Equal(t, codes.Error, spans[0].Status().Code)
	}
}

// group counts the ends of its members.
type group struct{ ended atomic.Int32 }

func (g *group) MemberEnded(*lock.LostError) { g.ended.Add(1) }

// However losses and releases interleave, one of them ends the hold: a loss is reported once,
// and the span ends once.
func TestConcurrentEnds(t *testing.T) {
	const callers = 4
	both := map[bool]int{}
	for round := range 2000 {
		var s engine.State
		var spans, losses, released, reported, notHeld atomic.Int32
		var g group
		traced(t, &s, func(span sdktrace.ReadOnlySpan) {
			if span.Name() == "redlatch.hold" {
				spans.Add(1)
			}
		})
		s.Watch(&g, "orders")
		start := make(chan struct{})
		var done, background sync.WaitGroup
		for i := range 2 * callers {
			done.Go(func() {
				<-start
				if (i+round)%2 == 0 { // whichever goroutine is first
					if s.Lose(newLoss()) {
						losses.Add(1)
						s.EndSpan(func(f func(context.Context)) bool {
							background.Go(func() { f(t.Context()) })
							return true
						})
					}
					return
				}
				err := s.End("release", wire.Object{Name: "orders"})
				if err == nil {
					_, end := s.StartRelease(t.Context())
					_ = s.Released(end, nil)
					released.Add(1)
				} else if errors.Is(err, lock.ErrLost) {
					reported.Add(1)
				} else {
					notHeld.Add(1)
				}
				_ = s.Context()
			})
		}
		close(start)
		done.Wait()
		background.Wait()
		require.EqualValues(t, 1, losses.Load()+released.Load())
		if err := s.End("release", wire.Object{Name: "orders"}); errors.Is(err, lock.ErrLost) { // all calls came before the loss
			reported.Add(1)
		} else {
			notHeld.Add(1)
		}
		require.Equal(t, losses.Load(), reported.Load())
		require.EqualValues(t, callers, notHeld.Load())
		require.EqualValues(t, 1, spans.Load())
		require.EqualValues(t, 1, g.ended.Load())
		require.Error(t, s.Context().Err())
		both[losses.Load() == 1]++
	}
	require.Len(t, both, 2, "both orders occur")
}

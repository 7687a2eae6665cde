package engine_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

const name = "orders"

// newLoss returns a loss, different from all others.
func newLoss() *lock.LostError {
	return &lock.LostError{Name: name, Reason: lock.ReasonExpired, When: time.Now()}
}

// group counts the ends of its members.
type group struct{ causes []*lock.LostError }

func (g *group) MemberEnded(cause *lock.LostError) { g.causes = append(g.causes, cause) }

// machine is a State and what it has reported.
type machine struct {
	engine.State
	loss  *lock.LostError // of the first Lose
	ctx   context.Context // created while the hold was held, or nil
	group group
}

// phases are the phases of a hold, and how it gets there.
var phases = []struct {
	name  string
	enter func(m *machine)
}{
	{"not acquired", func(*machine) {}},
	{"held", (*machine).acquire},
	{"lost", func(m *machine) { m.acquire(); m.Lose(m.loss) }},
	{"ended", func(m *machine) { m.acquire(); _ = m.End("Unlock", name) }},
	{"reported", func(m *machine) { m.acquire(); m.Lose(m.loss); _ = m.End("Unlock", name) }},
}

func (m *machine) acquire() {
	m.Begin(context.Background(), nil)
	m.ctx = m.Context()
	m.Watch(&m.group, name)
}

// outcome describes an error of the State.
func (m *machine) outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case err == error(m.loss):
		return "lost"
	case errors.Is(err, context.Canceled):
		return "canceled"
	default:
		return err.Error()
	}
}

func notHeld(op string) string { return fmt.Sprintf("%v: %s %q", lock.ErrNotHeld, op, name) }

// phase returns the phase that the methods without an effect report.
func (m *machine) phase(t *testing.T) string {
	t.Helper()
	err := m.outcome(m.Err("Extend", name))
	require.Equal(t, err == "ok", m.Held())
	switch {
	case m.ctx == nil:
		require.Equal(t, notHeld("Extend"), err)
		require.Nil(t, m.Loss())
		return "not acquired"
	case err == "ok":
		require.NoError(t, m.ctx.Err())
		require.Nil(t, m.Loss())
		require.Empty(t, m.group.causes)
		return "held"
	}
	require.Len(t, m.group.causes, 1, "the group is notified once")
	cause := m.group.causes[0]
	if m.Loss() == nil {
		require.Equal(t, context.Canceled, context.Cause(m.ctx))
		require.Equal(t, lock.ReasonGone, cause.Reason)
		require.Equal(t, name, cause.Name)
		require.Equal(t, notHeld("Extend"), err)
		return "ended"
	}
	require.Same(t, m.loss, m.Loss())
	require.Same(t, m.loss, cause)
	require.Equal(t, error(m.loss), context.Cause(m.ctx))
	if err == "lost" {
		return "lost"
	}
	require.Equal(t, notHeld("Extend"), err)
	return "reported"
}

// Every event in every phase.
func TestTransitions(t *testing.T) {
	type effect struct{ result, next string } // no next: the phase stays
	for event, c := range map[string]struct {
		do      func(m *machine) string
		effects map[string]effect
	}{
		"Lose": {
			func(m *machine) string {
				loss := m.loss
				if m.Loss() != nil {
					loss = newLoss() // of a second cause
				}
				return fmt.Sprint(m.Lose(loss))
			},
			map[string]effect{
				"not acquired": {"false", ""}, "held": {"true", "lost"}, "lost": {"false", ""}, "ended": {"false", ""}, "reported": {"false", ""},
			},
		},
		"End": {
			func(m *machine) string { return m.outcome(m.End("Unlock", name)) },
			map[string]effect{
				"not acquired": {notHeld("Unlock"), ""}, "held": {"ok", "ended"}, "lost": {"lost", "reported"},
				"ended": {notHeld("Unlock"), ""}, "reported": {notHeld("Unlock"), ""},
			},
		},
		"Watch": {
			func(m *machine) string {
				var late group
				m.Watch(&late, name)
				if len(late.causes) == 0 {
					m.Watch(&m.group, name)
					return "later"
				}
				if cause := late.causes[0]; m.loss != cause {
					return string(cause.Reason) + " " + cause.Name
				}
				return "lost"
			},
			map[string]effect{
				"held": {"later", ""}, "lost": {"lost", ""}, "ended": {string(lock.ReasonGone) + " " + name, ""}, "reported": {"lost", ""},
			},
		},
		"Context": {
			func(m *machine) string {
				if m.ctx != m.Context() {
					return "another context"
				}
				return m.outcome(context.Cause(m.ctx))
			},
			map[string]effect{"held": {"ok", ""}, "lost": {"lost", ""}, "ended": {"canceled", ""}, "reported": {"lost", ""}},
		},
		"RenewalFailed": {
			func(m *machine) string { m.RenewalFailed(errors.New("boom"), time.Second); return "" },
			map[string]effect{"not acquired": {}, "held": {}, "lost": {}, "ended": {}, "reported": {}},
		},
	} {
		for _, from := range phases {
			want, ok := c.effects[from.name]
			if !ok {
				continue // an unacquired hold has no context and no group
			}
			t.Run(event+" when "+from.name, func(t *testing.T) {
				m := &machine{loss: newLoss()}
				from.enter(m)
				require.Equal(t, from.name, m.phase(t))
				require.Equal(t, want.result, c.do(m))
				if want.next == "" {
					want.next = from.name
				}
				require.Equal(t, want.next, m.phase(t))
			})
		}
	}
}

// A context created after the end is canceled, and has the same cause.
func TestLateContext(t *testing.T) {
	for _, p := range phases[1:] {
		early, late := &machine{loss: newLoss()}, &machine{loss: newLoss()}
		p.enter(early)
		late.Begin(context.WithValue(t.Context(), early, 1), nil)
		switch p.name {
		case "lost", "reported":
			late.Lose(late.loss)
		}
		if p.name == "ended" || p.name == "reported" {
			_ = late.End("Unlock", name)
		}
		require.Equal(t, early.outcome(context.Cause(early.ctx)), late.outcome(context.Cause(late.Context())), p.name)
		require.Equal(t, 1, late.Context().Value(early), p.name)
		require.Equal(t, late.Context(), late.Context(), p.name)
	}
}

// The end of the parent is not the end of the hold.
func TestCanceledParent(t *testing.T) {
	m := &machine{loss: newLoss()}
	parent, cancel := context.WithCancelCause(t.Context())
	m.Begin(parent, nil)
	boom := errors.New("boom")
	cancel(boom)
	require.Equal(t, boom, context.Cause(m.Context()))
	require.True(t, m.Held())
}

func TestWatchUndone(t *testing.T) {
	for _, end := range []func(m *machine){
		func(m *machine) { m.Lose(m.loss) },
		func(m *machine) { _ = m.End("Unlock", name) },
	} {
		m := &machine{loss: newLoss()}
		m.acquire()
		m.Watch(nil, name)
		end(m)
		require.Empty(t, m.group.causes)
	}
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
	s.Begin(tel.StartHold(t.Context(), telemetry.Lock{Kind: "lock", Name: name}, lock.Owner{}, "", 0))
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

func TestReleased(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		err             error
		release, holder codes.Code
	}{
		{nil, codes.Unset, codes.Unset},
		{boom, codes.Error, codes.Unset},
		{fmt.Errorf("%w: %w", boom, newLoss()), codes.Error, codes.Error},
	} {
		var s engine.State
		status := map[string]codes.Code{}
		traced(t, &s, func(span sdktrace.ReadOnlySpan) { status[span.Name()] = span.Status().Code })
		require.NoError(t, s.End("Unlock", name))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		ctx, released := s.StartRelease(ctx)
		require.NoError(t, ctx.Err())
		require.Empty(t, status)
		require.Equal(t, c.err, s.Released(released, c.err))
		require.Equal(t, map[string]codes.Code{"redlatch.release": c.release, "redlatch.hold": c.holder}, status)
	}
}

// However losses and releases interleave, one of them ends the hold: a loss is reported once,
// and the span ends once.
func TestConcurrentEnds(t *testing.T) {
	const callers = 4
	both := map[bool]int{}
	for round := range 2000 {
		var s engine.State
		var spans, losses, released, reported, notHeld atomic.Int32
		var group atomic.Int32
		traced(t, &s, func(span sdktrace.ReadOnlySpan) {
			if span.Name() == "redlatch.hold" {
				spans.Add(1)
			}
		})
		s.Watch(notified{&group}, name)
		start := make(chan struct{})
		var done, background sync.WaitGroup
		for i := range 2 * callers {
			done.Go(func() {
				<-start
				if (i+round)%2 == 0 { // whichever goroutine is first
					loss := newLoss()
					if s.Lose(loss) {
						losses.Add(1)
						s.EndSpan(func(f func(context.Context)) bool {
							background.Go(func() { f(t.Context()) })
							return true
						})
					}
					return
				}
				switch err := s.End("Unlock", name); {
				case err == nil:
					_, end := s.StartRelease(t.Context())
					_ = s.Released(end, nil)
					released.Add(1)
				case errors.Is(err, lock.ErrLost):
					reported.Add(1)
				default:
					notHeld.Add(1)
				}
				_ = s.Context()
			})
		}
		close(start)
		done.Wait()
		background.Wait()
		require.EqualValues(t, 1, losses.Load()+released.Load())
		if err := s.End("Unlock", name); errors.Is(err, lock.ErrLost) { // all calls came before the loss
			reported.Add(1)
		} else {
			notHeld.Add(1)
		}
		require.Equal(t, losses.Load(), reported.Load())
		require.EqualValues(t, callers, notHeld.Load())
		require.EqualValues(t, 1, spans.Load())
		require.EqualValues(t, 1, group.Load())
		require.Error(t, s.Context().Err())
		both[losses.Load() == 1]++
	}
	require.Len(t, both, 2, "both orders occur")
}

// notified counts notifications of a group.
type notified struct{ n *atomic.Int32 }

func (n notified) MemberEnded(*lock.LostError) { n.n.Add(1) }

// Package telemetry turns what happens to locks into OpenTelemetry spans and
// metrics. A nil *Telemetry is telemetry switched off: every method is then a
// cheap no-op, so callers need not ask.
package telemetry

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/redlatch/redlatch/lock"
)

// scope is the name of the instrumentation.
const scope = "github.com/redlatch/redlatch"

// The providers that OpenTelemetry starts with drop everything.
var (
	initialTracers = otel.GetTracerProvider()
	initialMeters  = otel.GetMeterProvider()
)

// Telemetry is the instruments of one client.
type Telemetry struct {
	tracer trace.Tracer

	acquisitions metric.Int64Counter
	losses       metric.Int64Counter
	handOffs     metric.Int64Counter
	polls        metric.Int64Counter
	reconnects   metric.Int64Counter
	holds        metric.Int64UpDownCounter
	waiters      metric.Int64UpDownCounter
	wait         metric.Float64Histogram
	held         metric.Float64Histogram
	remaining    metric.Float64Histogram
}

// New returns the instruments of the given providers, where nil stands for the
// global one. It returns nil if neither is given and no global one was set.
func New(tracers trace.TracerProvider, meters metric.MeterProvider) (*Telemetry, error) {
	if tracers == nil && meters == nil &&
		otel.GetTracerProvider() == initialTracers && otel.GetMeterProvider() == initialMeters {
		return nil, nil
	}
	if tracers == nil {
		tracers = otel.GetTracerProvider()
	}
	if meters == nil {
		meters = otel.GetMeterProvider()
	}
	m := meters.Meter(scope)
	t := &Telemetry{tracer: tracers.Tracer(scope)}
	var errs []error
	counter := func(name, unit, what string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(what))
		errs = append(errs, err)
		return c
	}
	gauge := func(name, unit, what string) metric.Int64UpDownCounter {
		c, err := m.Int64UpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(what))
		errs = append(errs, err)
		return c
	}
	seconds := func(name, what string, bounds ...float64) metric.Float64Histogram {
		h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(what),
			metric.WithExplicitBucketBoundaries(bounds...))
		errs = append(errs, err)
		return h
	}
	t.acquisitions = counter("redlatch.acquisitions", "{acquisition}", "Calls of Lock and TryLock by kind and outcome.")
	t.losses = counter("redlatch.losses", "{hold}", "Holds that ended before Unlock, by reason.")
	t.handOffs = counter("redlatch.handoffs", "{handoff}", "Locks passed on inside the process.")
	t.polls = counter("redlatch.polls", "{attempt}", "Attempts of a waiter that no message caused.")
	t.reconnects = counter("redlatch.hub.reconnects", "{reconnect}", "Subscriber connections made anew.")
	t.holds = gauge("redlatch.holds", "{hold}", "Holds at the moment.")
	t.waiters = gauge("redlatch.waiters", "{waiter}", "Calls of Lock and TryLock under way.")
	t.wait = seconds("redlatch.acquire.duration", "How long Lock and TryLock took.",
		.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)
	t.held = seconds("redlatch.hold.duration", "How long locks were held.",
		.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)
	t.remaining = seconds("redlatch.renewal.remaining", "What was left of a lease when its renewal was confirmed.",
		.1, .25, .5, 1, 2.5, 5, 10, 15, 20, 25, 30)
	return t, errors.Join(errs...)
}

// The names of attributes.
const (
	kindKey      = attribute.Key("redlatch.kind")
	nameKey      = attribute.Key("redlatch.name")
	ownerKey     = attribute.Key("redlatch.owner")
	outcomeKey   = attribute.Key("redlatch.outcome")
	attemptsKey  = attribute.Key("redlatch.attempts")
	contendedKey = attribute.Key("redlatch.contended")
	reasonKey    = attribute.Key("redlatch.reason")
	tokenKey     = attribute.Key("redlatch.token")
)

// Acquire is an acquisition under way.
type Acquire struct {
	t     *Telemetry
	kind  string
	start time.Time
	span  trace.Span
}

// StartAcquire begins the span of an acquisition.
func (t *Telemetry) StartAcquire(ctx context.Context, kind, name string) (context.Context, Acquire) {
	if t == nil {
		return ctx, Acquire{}
	}
	a := Acquire{t: t, kind: kind, start: time.Now()}
	t.waiters.Add(ctx, 1, metric.WithAttributes(kindKey.String(kind)))
	ctx, a.span = t.tracer.Start(ctx, "redlatch.acquire", trace.WithAttributes(kindKey.String(kind), nameKey.String(name)))
	return ctx, a
}

// End ends it.
func (a Acquire) End(ctx context.Context, attempts int, contended bool, err error) {
	if a.t == nil {
		return
	}
	outcome := outcomeOf(err)
	attrs := metric.WithAttributes(kindKey.String(a.kind), outcomeKey.String(outcome))
	a.t.waiters.Add(ctx, -1, metric.WithAttributes(kindKey.String(a.kind)))
	a.t.acquisitions.Add(ctx, 1, attrs)
	a.t.wait.Record(ctx, time.Since(a.start).Seconds(), attrs)
	a.span.SetAttributes(outcomeKey.String(outcome), attemptsKey.Int(attempts), contendedKey.Bool(contended))
	if err != nil && !errors.Is(err, lock.ErrNotAcquired) {
		a.span.SetStatus(codes.Error, err.Error())
	}
	a.span.End()
}

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return "acquired"
	case errors.Is(err, lock.ErrNotAcquired):
		return "not_acquired"
	case errors.Is(err, lock.ErrIndeterminate):
		return "indeterminate"
	default:
		return "error"
	}
}

// Hold is a lock being held.
type Hold struct {
	t     *Telemetry
	kind  string
	start time.Time
	span  trace.Span
}

// StartHold begins the span of a hold, to be the parent of the work under it.
func (t *Telemetry) StartHold(ctx context.Context, kind, name, owner string, token int64) (context.Context, Hold) {
	if t == nil {
		return ctx, Hold{}
	}
	h := Hold{t: t, kind: kind, start: time.Now()}
	attrs := []attribute.KeyValue{kindKey.String(kind), nameKey.String(name), ownerKey.String(owner)}
	if token != 0 {
		attrs = append(attrs, tokenKey.Int64(token))
	}
	t.holds.Add(ctx, 1, metric.WithAttributes(kindKey.String(kind)))
	ctx, h.span = t.tracer.Start(ctx, "redlatch.hold", trace.WithAttributes(attrs...))
	return ctx, h
}

// End ends it; lost is nil after an Unlock.
func (h Hold) End(lost *lock.LostError) {
	if h.t == nil {
		return
	}
	ctx := context.Background()
	kind := kindKey.String(h.kind)
	h.t.holds.Add(ctx, -1, metric.WithAttributes(kind))
	h.t.held.Record(ctx, time.Since(h.start).Seconds(), metric.WithAttributes(kind))
	if lost != nil {
		reason := reasonKey.String(string(lost.Reason))
		h.t.losses.Add(ctx, 1, metric.WithAttributes(kind, reason))
		h.span.AddEvent("lost", trace.WithAttributes(reason))
		h.span.SetStatus(codes.Error, lost.Error())
	}
	h.span.End()
}

// StartRelease begins the span of a release and returns what ends it.
func (t *Telemetry) StartRelease(ctx context.Context, kind, name string) (context.Context, func(error)) {
	if t == nil {
		return ctx, noRelease
	}
	ctx, span := t.tracer.Start(ctx, "redlatch.release", trace.WithAttributes(kindKey.String(kind), nameKey.String(name)))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

func noRelease(error) {}

// HandOff counts a lock passed on inside the process.
func (t *Telemetry) HandOff(ctx context.Context, kind string) {
	if t != nil {
		t.handOffs.Add(ctx, 1, metric.WithAttributes(kindKey.String(kind)))
	}
}

// Poll counts an attempt that no message caused.
func (t *Telemetry) Poll() {
	if t != nil {
		t.polls.Add(context.Background(), 1)
	}
}

// Reconnect counts a subscriber connection made anew.
func (t *Telemetry) Reconnect() {
	if t != nil {
		t.reconnects.Add(context.Background(), 1)
	}
}

// Renewal notes what was left of a lease when its renewal was confirmed.
func (t *Telemetry) Renewal(remaining time.Duration, err error) {
	if t != nil && err == nil {
		t.remaining.Record(context.Background(), remaining.Seconds())
	}
}

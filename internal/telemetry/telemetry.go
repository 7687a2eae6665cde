// Package telemetry reports lock events as OpenTelemetry spans and metrics. A nil
// *Telemetry is disabled: every method is then a cheap no-op.
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

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/lock"
)

// scope is the instrumentation name.
const scope = "github.com/redlatch/redlatch"

// OpenTelemetry's initial providers drop everything.
var (
	initialTracers = otel.GetTracerProvider()
	initialMeters  = otel.GetMeterProvider()
)

// Telemetry holds the instruments of one client.
type Telemetry struct {
	tracer  trace.Tracer
	nameFor func(name string) string // for metrics; nil omits names

	acquisitions metric.Int64Counter
	losses       metric.Int64Counter
	handOffs     metric.Int64Counter
	polls        metric.Int64Counter
	reconnects   metric.Int64Counter
	failures     metric.Int64Counter
	holds        metric.Int64UpDownCounter
	waiters      metric.Int64UpDownCounter
	wait         metric.Float64Histogram
	held         metric.Float64Histogram
	remaining    metric.Float64Histogram
}

// New returns the instruments of the given providers; nil stands for the global one. It
// returns nil if both are nil and no global provider was set. nameFor maps the name of
// a lock to the attribute of metrics; nil omits the attribute.
func New(tracers trace.TracerProvider, meters metric.MeterProvider, nameFor func(string) string) (*Telemetry, error) {
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
	t := &Telemetry{tracer: tracers.Tracer(scope), nameFor: nameFor}
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
	t.polls = counter("redlatch.polls", "{attempt}", "Attempts of waiters that no message triggered.")
	t.reconnects = counter("redlatch.hub.reconnects", "{reconnect}", "Restored subscriber connections.")
	t.failures = counter("redlatch.renewal.failures", "{batch}", "Failed batches of renewals, which are retried.")
	t.holds = gauge("redlatch.holds", "{hold}", "Current holds.")
	t.waiters = gauge("redlatch.waiters", "{waiter}", "Calls of Lock and TryLock in progress.")
	t.wait = seconds("redlatch.acquire.duration", "How long Lock and TryLock took.",
		.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)
	t.held = seconds("redlatch.hold.duration", "How long locks were held.",
		.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)
	t.remaining = seconds("redlatch.renewal.remaining", "Remaining lease when its renewal was confirmed.",
		.1, .25, .5, 1, 2.5, 5, 10, 15, 20, 25, 30)
	return t, errors.Join(errs...)
}

// Attribute names.
const (
	kindKey      = attribute.Key("redlatch.kind")
	nameKey      = attribute.Key("redlatch.name")
	ownerKey     = attribute.Key("redlatch.owner")
	outcomeKey   = attribute.Key("redlatch.outcome")
	attemptsKey  = attribute.Key("redlatch.attempts")
	contendedKey = attribute.Key("redlatch.contended")
	reasonKey    = attribute.Key("redlatch.reason")
	permitKey    = attribute.Key("redlatch.permit")
	tokenKey     = attribute.Key("redlatch.token")
	wakeKey      = attribute.Key("redlatch.wake")
	remainingKey = attribute.Key("redlatch.remaining")
	errorKey     = attribute.Key("redlatch.error")
)

// Lock identifies a lock.
type Lock struct{ Kind, Name string }

// attrs are the metric attributes of a lock.
type attrs []attribute.KeyValue

func (t *Telemetry) attrsOf(l Lock) attrs {
	a := attrs{kindKey.String(l.Kind)}
	if t.nameFor != nil {
		if name := t.nameFor(l.Name); name != "" {
			a = append(a, nameKey.String(text.Safe(name)))
		}
	}
	return a
}

// with returns the attributes and more for a measurement.
func (a attrs) with(more ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributes(append(more, a...)...)
}

// spanAttributes returns the attributes of l and more for a span.
func (l Lock) spanAttributes(more ...attribute.KeyValue) trace.SpanStartEventOption {
	return trace.WithAttributes(append(more, kindKey.String(l.Kind), nameKey.String(text.Safe(l.Name)))...)
}

// Acquire is an acquisition in progress. Nothing is recorded of a nil one.
type Acquire struct {
	t     *Telemetry
	attrs attrs
	start time.Time
	span  trace.Span
}

// StartAcquire begins the span of an acquisition.
func (t *Telemetry) StartAcquire(ctx context.Context, l Lock) (context.Context, *Acquire) {
	if t == nil {
		return ctx, nil
	}
	a := &Acquire{t: t, attrs: t.attrsOf(l), start: time.Now()}
	t.waiters.Add(ctx, 1, a.attrs.with())
	ctx, a.span = t.tracer.Start(ctx, "redlatch.acquire", l.spanAttributes())
	return ctx, a
}

// Cause is the reason for an attempt of a waiter.
type Cause uint8

// The causes of an attempt after the first.
const (
	Subscribed Cause = iota + 1 // the subscription is confirmed; earlier messages may have been missed
	Message                     // a message of a release
	Local                       // a release in this process, or the previous head left
	Timer                       // an expiry reported by the server, or the safety poll
	HandedOver                  // no attempt: the key was passed on within the process
)

// String returns the cause as it appears in traces.
func (c Cause) String() string {
	return [...]string{"", "subscribed", "message", "local", "timer", "hand-off"}[c]
}

// Woken records a confirmed subscription, or the cause of another attempt.
func (a *Acquire) Woken(c Cause) {
	if a == nil {
		return
	}
	if c == Subscribed {
		a.span.AddEvent("subscribed")
		return
	}
	if c == Timer {
		a.t.polls.Add(context.Background(), 1, a.attrs.with())
	}
	a.span.AddEvent("woken", trace.WithAttributes(wakeKey.String(c.String())))
}

// End ends the span and records the metrics.
func (a *Acquire) End(ctx context.Context, attempts int, contended bool, err error) {
	if a == nil {
		return
	}

	o, failed := outcomeOf(err)
	outcome := outcomeKey.String(o)
	a.t.waiters.Add(ctx, -1, a.attrs.with())
	a.t.acquisitions.Add(ctx, 1, a.attrs.with(outcome))
	a.t.wait.Record(ctx, time.Since(a.start).Seconds(), a.attrs.with(outcome))
	a.span.SetAttributes(outcome, attemptsKey.Int(attempts), contendedKey.Bool(contended))
	if failed {
		a.span.SetStatus(codes.Error, text.Safe(err.Error()))
	}
	a.span.End()
}

// outcomeOf returns the outcome of an acquisition, and whether it is an error.
func outcomeOf(err error) (outcome string, failed bool) {
	switch {
	case err == nil:
		return "acquired", false
	case errors.Is(err, lock.ErrIndeterminate):
		return "indeterminate", true
	case errors.Is(err, lock.ErrUnavailable):
		return "unavailable", true
	case errors.Is(err, lock.ErrNotAcquired):
		return "not_acquired", false
	default:
		return "error", true
	}
}

// StartWait begins the span of a wait for a latch under ctx, and returns the function that ends
// it. Its error is nil if the latch was open, otherwise the cause of ctx or another error.
func (t *Telemetry) StartWait(ctx context.Context, l Lock) (end func(attempts int, err error)) {
	if t == nil {
		return func(int, error) {}
	}

	_, span := t.tracer.Start(ctx, "redlatch.wait", l.spanAttributes())
	return func(attempts int, err error) {
		outcome := "open"
		switch {
		case err == nil:
		case ctx.Err() != nil:
			outcome = "not_open"
		default:
			outcome = "error"
			span.SetStatus(codes.Error, text.Safe(err.Error()))
		}
		span.SetAttributes(outcomeKey.String(outcome), attemptsKey.Int(attempts))
		span.End()
	}
}

// Hold is a hold in progress. A nil Hold reports nothing.
type Hold struct {
	t     *Telemetry
	lock  Lock
	attrs attrs
	start time.Time
	span  trace.Span
}

// StartHold begins the span of a hold, the parent of the work under it. A hold has an owner
// or the id of a permit, and may have a fencing token.
func (t *Telemetry) StartHold(ctx context.Context, l Lock, owner lock.Owner, permit string, token int64) (context.Context, *Hold) {
	if t == nil {
		return ctx, nil
	}

	var of []attribute.KeyValue
	if !owner.IsZero() {
		of = append(of, ownerKey.String(owner.String()))
	}
	if permit != "" {
		of = append(of, permitKey.String(permit))
	}
	if token != 0 {
		of = append(of, tokenKey.Int64(token))
	}
	h := &Hold{t: t, lock: l, attrs: t.attrsOf(l), start: time.Now()}
	t.holds.Add(ctx, 1, h.attrs.with())
	ctx, h.span = t.tracer.Start(ctx, "redlatch.hold", l.spanAttributes(of...))
	return ctx, h
}

// SetToken adds a fencing token, which the hold has got later, to the span of the hold with that
// context.
func (t *Telemetry) SetToken(ctx context.Context, token int64) {
	if t != nil {
		trace.SpanFromContext(ctx).SetAttributes(tokenKey.Int64(token))
	}
}

// RenewalFailed records a failed renewal and the remaining lease.
func (h *Hold) RenewalFailed(err error, left time.Duration) {
	if h != nil {
		h.span.AddEvent("renewal failed", trace.WithAttributes(
			errorKey.String(text.Safe(err.Error())), remainingKey.Float64(left.Seconds())))
	}
}

// End ends the span; lost is nil after an Unlock.
func (h *Hold) End(lost *lock.LostError) {
	if h == nil {
		return
	}

	ctx := context.Background()
	h.t.holds.Add(ctx, -1, h.attrs.with())
	h.t.held.Record(ctx, time.Since(h.start).Seconds(), h.attrs.with())
	if lost != nil {
		reason := reasonKey.String(string(lost.Reason))
		h.t.losses.Add(ctx, 1, h.attrs.with(reason))
		h.span.AddEvent("lost", trace.WithAttributes(reason))
		h.span.SetStatus(codes.Error, text.Safe(lost.Error()))
	}

	h.span.End()
}

// StartRelease begins the span of a release, a child of the hold's, and returns the
// function that ends it.
func (h *Hold) StartRelease(ctx context.Context) (context.Context, func(error)) {
	if h == nil {
		return ctx, func(error) {}
	}

	ctx, span := h.t.tracer.Start(trace.ContextWithSpan(ctx, h.span), "redlatch.release", h.lock.spanAttributes())
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, text.Safe(err.Error()))
		}
		span.End()
	}
}

// HandedOver counts n acquisitions that were served within the process.
func (t *Telemetry) HandedOver(ctx context.Context, l Lock, n int) {
	if t != nil && n > 0 {
		t.handOffs.Add(ctx, int64(n), t.attrsOf(l).with())
	}
}

// Reconnect counts a restored subscriber connection.
func (t *Telemetry) Reconnect() {
	if t != nil {
		t.reconnects.Add(context.Background(), 1)
	}
}

// Renewal records the shortest remaining lease of a confirmed batch, or a failure.
func (t *Telemetry) Renewal(left time.Duration, err error) {
	switch {
	case t == nil:
	case err != nil:
		t.failures.Add(context.Background(), 1)
	default:
		t.remaining.Record(context.Background(), left.Seconds())
	}
}

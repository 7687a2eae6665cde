package robustness

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"
)

// overtaken returns the waiters of a fair lock that a later one has overtaken, and how many pairs
// of waiters were compared. A waiter that had a queue position before another called Lock must
// return first. So must a request for permits that has waited for a while. The check passes over waiters that a fault may have delayed or taken out of the
// queue, calls of owners that may hold the lock already, and leases that a busy machine does not
// notice.
func (h *history) overtaken(lock string) (wrongs []string, pairs int) {
	var waiters []*claim // in the order of their calls
	owners := map[string]bool{}
	for _, c := range h.claims {
		if !slices.Equal(c.locks, []string{lock}) {
			continue
		}
		if c.acquired() && !owners[c.owner] {
			waiters = append(waiters, c)
		}
		owners[c.owner] = owners[c.owner] || c.named
	}
	for i, a := range waiters {
		if a.lease > 0 {
			continue
		}
		for _, b := range waiters[i+1:] {
			if b.called > a.returned {
				break
			}
			if !ordered(a, b) || h.disturbed(a.called, a.returned) {
				continue
			}
			pairs++
			if b.returned < a.returned {
				wrongs = append(wrongs, fmt.Sprintf("%s: overtaken by %s on %s", a.id, b.id, lock))
			}
		}
	}
	return wrongs, pairs
}

// orderAfter returns how long a request for permits has waited when no later one may overtake it: 100 ms,
// until its next attempt has come to the server, with slack.
func (c *claim) orderAfter() time.Duration { return 200*time.Millisecond + 4*c.rtt }

// ordered reports whether a has to acquire the lock before b, which has come later.
func ordered(a, b *claim) bool {
	if kindOf(a.kind).limit > 0 {
		return b.called > a.called+int64(a.orderAfter())
	}
	return a.queued > 0 && b.called >= a.queued
}

// disturbed reports whether a fault that may change the order of waiters came between two times,
// or shortly before, or the machine was late then.
func (h *history) disturbed(from, to int64) bool {
	if slices.ContainsFunc(h.busy, func(e event) bool { return e.At < to && from < e.Until }) {
		return true
	}
	return slices.ContainsFunc(h.disturbances, func(e event) bool { return e.At < to && from < e.Until+int64(watchdogTimeout) })
}

// claimKey is the key of a claim in a context.
type claimKey struct{}

// tracing provides spans that write an event when an acquisition has made its first attempt and
// its subscription is confirmed: it then has a queue position.
type tracing struct {
	embedded.TracerProvider
	journal *journal
}

func (t tracing) Tracer(string, ...trace.TracerOption) trace.Tracer {
	return tracer{journal: t.journal}
}

type tracer struct {
	embedded.Tracer
	journal *journal
}

func (t tracer) Start(ctx context.Context, _ string, _ ...trace.SpanStartOption) (context.Context, trace.Span) {
	claim, _ := ctx.Value(claimKey{}).(string)
	return ctx, span{journal: t.journal, claim: claim}
}

type span struct {
	noop.Span
	journal *journal
	claim   string
}

func (s span) AddEvent(name string, _ ...trace.EventOption) {
	if name == "subscribed" && s.claim != "" {
		s.journal.write(event{What: queued, At: clock(), Claim: s.claim})
	}
}

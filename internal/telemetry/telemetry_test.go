package telemetry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// lifecycle makes all calls in the life of a lock.
func lifecycle(ctx context.Context, t *telemetry.Telemetry, l telemetry.Lock, errBoom error, lost *lock.LostError) {
	ctx, span := t.StartAcquire(ctx, l)
	span.Woken(telemetry.Subscribed)
	span.Woken(telemetry.Message)
	span.Woken(telemetry.Timer)
	span.End(ctx, 3, true, nil)
	ctx, hold := t.StartHold(ctx, l, lock.Owner{}, "", 1)
	hold.RenewalFailed(errBoom, time.Second)
	ctx, released := hold.StartRelease(ctx)
	t.HandedOver(ctx, l, 1)
	released(errBoom)
	hold.End(lost)
	t.Reconnect()
	t.Renewal(time.Second, nil)
	t.Renewal(time.Second, errBoom)
}

var (
	orders  = telemetry.Lock{Kind: "lock", Name: "orders"}
	errBoom = errors.New("boom")
	lost    = &lock.LostError{Name: "orders", Reason: lock.ReasonGone}
)

func TestNewWithoutProviders(t *testing.T) {
	off, err := telemetry.New(nil, nil, nil)
	require.NoError(t, err)
	require.Nil(t, off)
	on, err := telemetry.New(tracenoop.NewTracerProvider(), nil, nil)
	require.NoError(t, err)
	require.NotNil(t, on)
	on, err = telemetry.New(nil, metricnoop.NewMeterProvider(), nil)
	require.NoError(t, err)
	require.NotNil(t, on)
	lifecycle(t.Context(), on, orders, errBoom, lost) // one provider enables both
}

func TestDisabledAllocatesNothing(t *testing.T) {
	require.Zero(t, testing.AllocsPerRun(100, func() { lifecycle(t.Context(), nil, orders, errBoom, lost) }))
}

func BenchmarkDisabled(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		lifecycle(b.Context(), nil, orders, errBoom, lost)
	}
}

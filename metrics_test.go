package redlatch_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

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

func TestMetrics(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		r := record(t)
		c := harness.Client(t, s, r.options(redlatch.WithWatchdogTimeout(timeout))...)
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- c.Lock("orders").Do(context.Background(), nothing) }()
		harness.Waits(t, 1, c)
		_, err = c.FencedLock("orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		during := r.measured()
		assert.Equal(t, "gauge {hold} {kind=lock}=1", during["redlatch.holds"])
		assert.Equal(t, "gauge {waiter} {kind=fenced}=0 {kind=lock}=1", during["redlatch.waiters"])
		harness.Eventually(t, 5*time.Second, "a renewal", func() bool { return r.measured()["redlatch.renewal.remaining"] != "" })
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-done)

		doomed, err := c.Lock("doomed").Lock(t.Context())
		require.NoError(t, err)
		other := harness.Client(t, s)
		harness.Eventually(t, 10*time.Second, "an expiry that wakes a waiter", func() bool { // unless it precedes the wait
			theirs, err := other.Lock("theirs").Lock(t.Context(), lock.Lease(100*time.Millisecond))
			require.NoError(t, err)
			require.NoError(t, c.Lock("theirs").Do(t.Context(), nothing))
			require.ErrorIs(t, theirs.Unlock(t.Context()), lock.ErrLost)
			return r.measured()["redlatch.polls"] != ""
		})
		s.Kill()
		harness.Eventually(t, 10*time.Second, "a loss", func() bool { return r.measured()["redlatch.losses"] != "" })
		require.ErrorIs(t, doomed.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, s.Restart())
		theirs, err := harness.Client(t, s).Lock("theirs").Lock(t.Context())
		require.NoError(t, err)
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

func TestMetricsOfOtherKinds(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		r := record(t)
		c := s.Client(t, r.options()...)
		done := make(chan error, 3)

		// Heartbeats keep queue positions. They are neither polls nor renewals.
		h, err := c.FairLock("orders").Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		go func() { done <- c.FairLock("orders").Do(context.Background(), nothing, lock.Lease(time.Hour)) }()
		synctest.Wait()
		s.Reset()
		time.Sleep(safetyPoll - time.Second)
		require.Equal(t, 1, s.Calls("evalsha"), "the heartbeat")
		assert.Equal(t, "gauge {waiter} {kind=fair}=1", r.measured()["redlatch.waiters"])
		assert.Empty(t, r.measured()["redlatch.renewal.remaining"])
		assert.Empty(t, r.measured()["redlatch.polls"])
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-done)
		assert.Contains(t, r.tree(), "redlatch.acquire{attempts=1 contended=true kind=fair name=orders outcome=acquired}")

		// All readers that are next enter when a writer leaves.
		rw := c.RWLock("catalogue")
		h, err = rw.Write().Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		for range cap(done) {
			go func() { done <- rw.Read().Do(context.Background(), nothing) }()
		}
		synctest.Wait()
		require.NoError(t, h.Unlock(t.Context()))
		for range cap(done) {
			require.NoError(t, <-done)
		}
		_, err = rw.Read().TryLock(lock.WithOwner(t.Context(), c.NewOwner()))
		require.NoError(t, err)

		got := r.measured()
		for name, want := range map[string]string{
			"redlatch.acquisitions":  "counter {acquisition} {kind=fair outcome=acquired}=2 {kind=read outcome=acquired}=4 {kind=write outcome=acquired}=1",
			"redlatch.holds":         "gauge {hold} {kind=fair}=0 {kind=read}=1 {kind=write}=0",
			"redlatch.waiters":       "gauge {waiter} {kind=fair}=0 {kind=read}=0 {kind=write}=0",
			"redlatch.hold.duration": "histogram s {kind=fair}=2 {kind=read}=3 {kind=write}=1",
			"redlatch.handoffs":      "counter {handoff} {kind=fair}=1",
			"redlatch.polls":         "",
		} {
			assert.Equal(t, want, got[name], name)
		}
	})
}

// Terms, and runs of once-only work, are holds of kinds of their own.
func TestMetricsOfElectionsAndOnce(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		r := record(t)
		c := s.Client(t, r.options(redlatch.WithMetricName(func(name string) string { return name }))...)
		term, err := c.Election("scheduler").Campaign(t.Context(), "")
		require.NoError(t, err)
		next := make(chan error, 1)
		go func() {
			term, err := c.Election("scheduler").Campaign(context.Background(), "")
			if err == nil {
				err = term.Resign(context.Background())
			}
			next <- err
		}()
		synctest.Wait()
		during := r.measured()
		assert.Equal(t, "gauge {hold} {kind=election name=scheduler}=1", during["redlatch.holds"])
		assert.Equal(t, "gauge {waiter} {kind=election name=scheduler}=1", during["redlatch.waiters"])
		require.NoError(t, term.Resign(t.Context()))
		require.NoError(t, <-next)
		for range 2 {
			_, err := c.Once("report").Run(t.Context(), "1", func(context.Context) error {
				assert.Equal(t, "gauge {hold} {kind=election name=scheduler}=0 {kind=once name=report}=1", r.measured()["redlatch.holds"])
				return nil
			})
			require.NoError(t, err)
		}

		got := r.measured()
		for name, want := range map[string]string{
			"redlatch.acquisitions":  "counter {acquisition} {kind=election name=scheduler outcome=acquired}=2 {kind=once name=report outcome=acquired}=1",
			"redlatch.hold.duration": "histogram s {kind=election name=scheduler}=2 {kind=once name=report}=1",
			"redlatch.waiters":       "gauge {waiter} {kind=election name=scheduler}=0 {kind=once name=report}=0",
			"redlatch.handoffs":      "",
		} {
			assert.Equal(t, want, got[name], name)
		}
	})
}

func TestNamesInMetricsAreOptional(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r := record(t)
		template := func(name string) string {
			template, _, _ := strings.Cut(name, ":")
			return strings.TrimPrefix(template, "private")
		}
		c := harness.Client(t, s, r.options(redlatch.WithMetricName(template))...)
		for _, name := range []string{"order:1", "order:2", "private:1"} {
			require.NoError(t, c.Lock(name).Do(t.Context(), nothing))
		}
		assert.Equal(t, "histogram s {kind=lock name=order}=2 {kind=lock}=1", r.measured()["redlatch.hold.duration"])

		theirs, err := harness.Client(t, s).Lock("order:3").Lock(t.Context(), lock.Lease(time.Second))
		require.NoError(t, err)
		require.NoError(t, c.Lock("order:3").Do(t.Context(), nothing)) // woken by the expiry
		require.ErrorIs(t, theirs.Unlock(t.Context()), lock.ErrLost)
		assert.Regexp(t, `^counter {attempt} {kind=lock name=order}=\d+$`, r.measured()["redlatch.polls"])
	})
}

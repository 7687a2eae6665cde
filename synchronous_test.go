package redlatch_test

import (
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// observed counts how often rueidis leaves its synchronous mode on a connection: it then removes the
// deadline.
type observed struct {
	net.Conn
	pipelined *atomic.Int32
}

func (o observed) SetDeadline(t time.Time) error {
	if t.IsZero() {
		o.pipelined.Add(1)
	}
	return o.Conn.SetDeadline(t)
}

// Opening a client, and a single caller whose context cannot end, use the synchronous mode of rueidis,
// whose requests take half of the processor time. Callers that wait do not.
func TestSingleCallersAreSynchronous(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var pipelined atomic.Int32
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{
			InitAddress: []string{s.Addr},
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				conn, err := d.DialContext(ctx, "tcp", addr)
				return observed{conn, &pipelined}, err
			},
		})
		require.NoError(t, err)
		t.Cleanup(c.Close)
		for range 5 {
			require.NoError(t, c.Lock("free").Do(context.Background(), nothing))
		}
		require.Zero(t, pipelined.Load())

		h, err := harness.Client(t, s).Lock("taken").Lock(t.Context(), lock.Lease(50*time.Millisecond))
		require.NoError(t, err)
		require.NoError(t, c.SpinLock("taken").Do(context.Background(), nothing)) // without a connection for messages
		require.NotZero(t, pipelined.Load(), h)
	})
}

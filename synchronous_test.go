package redlatch_test

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
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

// A single caller uses the synchronous mode of rueidis, whose requests take half of the processor time,
// although its contexts can be canceled. Several callers, and those that wait, do not.
func TestSingleCallersAreSynchronous(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		dial := func(pipelined *atomic.Int32) *redlatch.Client {
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{
				InitAddress: []string{s.Addr},
				DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
					conn, err := d.DialContext(ctx, "tcp", addr)
					return observed{conn, pipelined}, err
				},
			})
			require.NoError(t, err)
			t.Cleanup(c.Close)
			return c
		}
		pairs := func(c *redlatch.Client, l lock.Locker, pause time.Duration) {
			for range 5 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				require.NoError(t, l.Do(ctx, nothing))
				cancel()
				time.Sleep(pause) // another request is made on a goroutine of its own
			}
		}
		var pipelined atomic.Int32
		c := dial(&pipelined)
		pairs(c, c.Lock("alone"), 0)
		pairs(c, c.Lock("alone"), 30*time.Millisecond)
		pairs(c, c.FairLock("alone, fair"), 0)
		require.Zero(t, pipelined.Load())

		var several sync.WaitGroup
		for range 8 {
			several.Go(func() { pairs(c, c.Lock(t.Name()+"/"+c.NewOwner().String()), 0) })
		}
		several.Wait()
		require.NotZero(t, pipelined.Load())

		var waiting atomic.Int32
		w := dial(&waiting)
		h, err := harness.Client(t, s).Lock("taken").Lock(t.Context(), lock.Lease(50*time.Millisecond))
		require.NoError(t, err)
		require.NoError(t, w.SpinLock("taken").Do(t.Context(), nothing)) // without a connection for messages
		require.NotZero(t, waiting.Load(), h)
	})
}

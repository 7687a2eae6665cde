package pglock_test

import (
	"bytes"
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// observer looks whether a hold has ended before anything is done that lets others have its lock.
type observer struct {
	hold   atomic.Pointer[lock.Hold]
	early  atomic.Bool // it has not
	given  atomic.Bool // something was done
	broken atomic.Bool // connections fail when something is written
}

func (o *observer) gives() {
	if h := o.hold.Load(); h != nil {
		o.given.Store(true)
		if (*h).Context().Err() == nil {
			o.early.Store(true)
		}
	}
}

// observed is a connection with an observer: its end, a message that asks for it, and an unlock give a lock away.
type observed struct {
	net.Conn
	*observer
}

func (c observed) Write(b []byte) (int, error) {
	if c.broken.Load() {
		return 0, net.ErrClosed
	}
	if b[0] == 'X' || bytes.Contains(b, []byte("redlatch_unlock")) {
		c.gives()
	}
	return c.Conn.Write(b)
}

func (c observed) Close() error {
	c.gives()
	return c.Conn.Close()
}

// TraceQueryStart implements pgx.QueryTracer: two of the statements of a table give locks away.
func (o *observer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "owner = NULL") || strings.Contains(q.SQL, "THEN NULL") {
		o.gives()
	}
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (o *observer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// observedPool returns a pool whose connections, or their statements for a table, have an observer.
func observedPool(t *testing.T, k kind, addr string, o *observer) *pgxpool.Pool {
	t.Helper()
	c, err := pgxpool.ParseConfig(url(addr))
	require.NoError(t, err)
	if k.name == table.name {
		c.ConnConfig.Tracer = o
	} else {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, network, addr)
			return observed{conn, o}, err
		}
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), c)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// However a hold ends, it has ended before the client does anything on the server that lets others have its lock.
func TestHoldsEndFirst(t *testing.T) {
	ends := []struct {
		name string
		of   []kind
		opts []lock.Option
		end  func(t *testing.T, o *observer, p *testserver.Proxy, c *driver.Client, h lock.Hold)
	}{
		{"unlock", kinds, nil, func(t *testing.T, _ *observer, _ *testserver.Proxy, _ *driver.Client, h lock.Hold) {
			require.NoError(t, h.Unlock(t.Context()))
		}},
		{"close", kinds, nil, func(_ *testing.T, _ *observer, _ *testserver.Proxy, c *driver.Client, _ lock.Hold) { c.Close() }},
		{"lease", kinds, []lock.Option{lock.Lease(ttl / 4)}, func(*testing.T, *observer, *testserver.Proxy, *driver.Client, lock.Hold) {
		}},
		{"silence", kinds, nil, func(_ *testing.T, _ *observer, p *testserver.Proxy, _ *driver.Client, _ lock.Hold) {
			p.Set(testserver.Mute)
		}},
		{"write", []kind{advisory}, nil, func(_ *testing.T, o *observer, _ *testserver.Proxy, _ *driver.Client, _ lock.Hold) {
			o.broken.Store(true)
		}},
		{"cut", []kind{advisory}, nil, func(_ *testing.T, _ *observer, p *testserver.Proxy, _ *driver.Client, _ lock.Hold) { p.Down() }},
	}
	for _, e := range ends {
		for _, k := range e.of {
			t.Run(e.name+"/"+k.name, func(t *testing.T) {
				t.Parallel()
				var o observer
				p := testserver.NewProxy(t, commonServer(t).addr())
				c := k.make(t, observedPool(t, k, p.Addr, &o))
				h := acquire(t, c.Lock("ends-first-"+e.name+k.name), e.opts...)
				ended := h.Context()
				o.hold.Store(&h)
				e.end(t, &o, p, c, h)
				harness.Receive(t, ttl+pause, "the end of the hold", ended.Done())
				p.Set(testserver.Pass)
				harness.Eventually(t, soon, "the lock is given away", o.given.Load)
				time.Sleep(50 * time.Millisecond) // what else is done
				require.False(t, o.early.Load(), "others can have the lock of a hold that goes on")
			})
		}
	}
}

package redlatch

import (
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// sink is a connection that swallows what is written.
type sink struct{ net.Conn }

func (sink) Write(b []byte) (int, error) { return len(b), nil }

// A write is delayed only while many requests are in flight, and only if it is for a few of them.
func TestWritesAreDelayedUnderLoad(t *testing.T) {
	const few = minRequest*manyInFlight - 1
	for name, row := range map[string]struct {
		inFlight int32
		bytes    int
		delay    time.Duration
	}{
		"alone":                {1, 1, 0},
		"not many":             {manyInFlight - 1, 1, 0},
		"many, one request":    {manyInFlight, few, writeDelay},
		"many, together":       {manyInFlight, few + 1, 0},
		"more, no longer many": {2 * manyInFlight, few + 1, writeDelay},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var inFlight atomic.Int32
				inFlight.Store(row.inFlight)
				c := &ownConn{Conn: sink{}, written: make(chan struct{}), inFlight: &inFlight}
				began := time.Now()
				n, err := c.Write([]byte(strings.Repeat("x", row.bytes)))
				require.NoError(t, err)
				require.Equal(t, row.bytes, n)
				require.Equal(t, row.delay, time.Since(began))
			})
		})
	}
}

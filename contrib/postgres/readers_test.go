package pglock_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
)

// Readers of one client, of which there is always one, let a writer of another client in, and need few connections.
func TestReadersLetWritersIn(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	const name = "readers-and-writer"
	for _, readers := range []int{2, 20} {
		c := advisory.make(t, newPool(t, s.addr()), pglock.MaxConns(3)).RWLock(name).Read()
		writer := advisory.make(t, newPool(t, s.addr())).RWLock(name).Write()
		ctx, stop := context.WithCancel(t.Context())
		var all sync.WaitGroup
		finish := func() {
			stop()
			all.Wait()
		}
		defer finish() // after a failure
		for i := range readers {
			all.Go(func() {
				time.Sleep(time.Duration(i) * 50 * time.Millisecond / time.Duration(readers)) // so that they overlap
				for ctx.Err() == nil {
					h, err := c.Lock(t.Context())
					if err != nil { // the test has failed
						return
					}
					time.Sleep(50 * time.Millisecond)
					assert.NoError(t, h.Unlock(t.Context()))
				}
			})
		}
		for range harness.Size(5, 20) {
			began := time.Now()
			h := acquire(t, writer)
			require.Less(t, time.Since(began), time.Second)
			require.NoError(t, h.Unlock(t.Context()))
			time.Sleep(20 * time.Millisecond)
		}
		finish()
	}
}

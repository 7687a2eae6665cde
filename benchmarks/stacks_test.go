//go:build !race

package benchmarks

import (
	"context"
	"runtime"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// TestWaitersHaveSmallStacks verifies that the stack of a goroutine that waits for a lock grows once. A few
// of them grow again: one whose allocation takes a new span of memory, or one that waits for the
// mutex of the queue.
func TestWaitersHaveSmallStacks(t *testing.T) {
	const (
		waiters  = 2000
		smallest = 2048 // of the runtime
		most     = 2*smallest + smallest/2
	)
	s, err := testserver.Start(redisProgram(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	open := func() *redlatch.Client {
		c, err := redlatch.Open(t.Context(), "redis://"+s.Addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
	holder, client := open(), open()
	if _, err := holder.Lock("orders").Lock(t.Context(), lock.Lease(time.Minute)); err != nil {
		t.Fatal(err)
	}
	before := stackBytes()
	if size := startingStack(); size != smallest {
		t.Skipf("goroutines of this process start with stacks of %d bytes", size)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, waiters)
	l := client.Lock("orders")
	for range waiters {
		go func() {
			_, err := l.Lock(ctx)
			ended <- err
		}()
	}
	for client.Stats().Waiting < waiters {
		time.Sleep(time.Millisecond)
	}
	each := (stackBytes() - before) / waiters
	t.Logf("%d bytes", each)
	if each > most {
		t.Errorf("the stack of a waiter has %d bytes, want at most %d", each, most)
	}
	cancel()
	for range waiters {
		<-ended
	}
}

// stackBytes returns the memory of all stacks, after those that are too large have been halved.
func stackBytes() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.StackInuse)
}

// startingStack returns the size of the stack of a new goroutine: the runtime adapts it to those that
// it has seen.
func startingStack() int {
	sample := []metrics.Sample{{Name: "/gc/stack/starting-size:bytes"}}
	metrics.Read(sample)
	return int(sample[0].Value.Uint64())
}

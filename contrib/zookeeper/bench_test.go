package zklock

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// locker is a lock of one process, of this package or go-zookeeper's own recipe.
type locker interface {
	acquire() error
	release() error
}

type ours struct {
	l lock.Locker
	h lock.Hold
}

func (o *ours) acquire() (err error) {
	o.h, err = o.l.Lock(context.Background())
	return err
}

func (o *ours) release() error { return o.h.Unlock(context.Background()) }

type recipe struct{ *zk.Lock }

func (r recipe) acquire() error { return r.Lock.Lock() }
func (r recipe) release() error { return r.Unlock() }

// compare runs a benchmark with the locks of both, each with n connections.
func compare(b *testing.B, n int, run func(b *testing.B, lockers []locker)) {
	servers := addrs(ensemble(b, 1))
	b.Run("of=zklock", func(b *testing.B) {
		name := unused(b)
		var lockers []locker
		for range n {
			lockers = append(lockers, &ours{l: openWith(b, servers, 20*tick, nil).Lock(name)})
		}
		run(b, lockers)
	})
	b.Run("of=recipe", func(b *testing.B) {
		path := "/recipe/" + escape(unused(b))
		var lockers []locker
		for range n {
			lockers = append(lockers, recipe{zk.NewLock(admin(b, servers...), path, zk.WorldACL(zk.PermAll))})
		}
		run(b, lockers)
	})
}

// BenchmarkFree acquires and releases a lock that is free.
func BenchmarkFree(b *testing.B) {
	compare(b, 1, func(b *testing.B, lockers []locker) {
		l := lockers[0]
		require.NoError(b, l.acquire())
		require.NoError(b, l.release())
		b.ResetTimer()
		for range b.N {
			if err := l.acquire(); err != nil {
				b.Fatal(err)
			}
			if err := l.release(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkHandover measures from a release to the acquisition of the one that waits. Two processes pass the lock on.
func BenchmarkHandover(b *testing.B) {
	compare(b, 2, func(b *testing.B, lockers []locker) {
		require.NoError(b, lockers[0].acquire())
		var took atomic.Int64
		b.ResetTimer()
		for i := range b.N {
			holder, waiter := lockers[i%2], lockers[1-i%2]
			got := make(chan time.Time, 1)
			go func() {
				if err := waiter.acquire(); err != nil {
					b.Error(err)
				}
				got <- time.Now()
			}()
			time.Sleep(5 * time.Millisecond) // it waits then
			released := time.Now()
			if err := holder.release(); err != nil {
				b.Fatal(err)
			}
			took.Add(int64((<-got).Sub(released)))
		}
		b.StopTimer()
		b.ReportMetric(float64(took.Load())/float64(b.N), "ns/hand-over")
		require.NoError(b, lockers[b.N%2].release())
	})
}

// BenchmarkWaiters has 16 processes acquire and release one lock as fast as they can.
func BenchmarkWaiters(b *testing.B) {
	compare(b, 16, func(b *testing.B, lockers []locker) {
		var left atomic.Int64
		left.Store(int64(b.N))
		var done sync.WaitGroup
		b.ResetTimer()
		for _, l := range lockers {
			done.Go(func() {
				for left.Add(-1) >= 0 {
					if err := l.acquire(); err != nil {
						b.Error(err)
						return
					}
					if err := l.release(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		done.Wait()
	})
}

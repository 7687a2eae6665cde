//go:build linux

package etcdlock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/redlatch/redlatch/lock"
)

// The benchmarks measure a lock of this package beside concurrency.Mutex of etcd. All callers share one client of etcd, and
// of this package. Each caller of a Mutex has a session of its own, because it does not exclude callers with the same one.
//
//	go test -run '^$' -bench . -count 6

// pair is what a caller does: it takes a lock and releases it.
type pair func(ctx context.Context) error

// contenders returns for each library what makes callers of locks.
func contenders(b *testing.B, etcd *clientv3.Client) map[string]func(name string) pair {
	c := locksOf(b, etcd)
	return map[string]func(name string) pair{
		"etcdlock": func(name string) pair {
			l := c.Lock(name)
			return func(ctx context.Context) error {
				h, err := l.Lock(ctx)
				if err != nil {
					return err
				}
				return h.Unlock(ctx)
			}
		},
		"mutex": func(name string) pair {
			session, err := concurrency.NewSession(etcd)
			require.NoError(b, err)
			b.Cleanup(func() { _ = session.Close() })
			m := concurrency.NewMutex(session, "/"+name)
			return func(ctx context.Context) error {
				if err := m.Lock(ctx); err != nil {
					return err
				}
				return m.Unlock(ctx)
			}
		},
	}
}

// benchmark has callers take locks. The names go round.
func benchmark(b *testing.B, callers int, names ...string) {
	for _, library := range []string{"etcdlock", "mutex"} {
		b.Run(library, func(b *testing.B) {
			etcd := connect(b, shared(b))
			newPair := contenders(b, etcd)[library]
			var pairs []pair
			for i := range callers {
				pairs = append(pairs, newPair(names[i%len(names)]))
			}
			b.ReportAllocs()
			b.ResetTimer()
			var work sync.WaitGroup
			for i, p := range pairs {
				work.Go(func() {
					for range (b.N + callers - 1 - i) / callers {
						if err := p(context.Background()); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			work.Wait()
			b.StopTimer()
		})
	}
}

// One caller takes a free lock.
func BenchmarkFree(b *testing.B) { benchmark(b, 1, "bench-free") }

// Sixty-four callers each take a lock of their own.
func BenchmarkFreeMany(b *testing.B) {
	var names []string
	for i := range 64 {
		names = append(names, fmt.Sprintf("bench-free-%d", i))
	}
	benchmark(b, len(names), names...)
}

// Two callers pass a lock to each other.
func BenchmarkHandover(b *testing.B) { benchmark(b, 2, "bench-handover") }

// Sixteen callers wait for each other.
func BenchmarkWaiters(b *testing.B) { benchmark(b, 16, "bench-waiters") }

// TryLock of a lock that is held.
func BenchmarkHeld(b *testing.B) {
	etcd := connect(b, shared(b))
	c := locksOf(b, etcd)
	h, err := c.Lock("bench-held").Lock(b.Context())
	require.NoError(b, err)
	defer func() { _ = h.Unlock(context.Background()) }()
	b.Run("etcdlock", func(b *testing.B) {
		l := c.Lock("bench-held")
		for b.Loop() {
			_, err := l.TryLock(b.Context())
			require.ErrorIs(b, err, lock.ErrNotAcquired)
		}
	})
	b.Run("mutex", func(b *testing.B) {
		var sessions []*concurrency.Session
		for range 2 {
			session, err := concurrency.NewSession(etcd)
			require.NoError(b, err)
			defer session.Close()
			sessions = append(sessions, session)
		}
		require.NoError(b, concurrency.NewMutex(sessions[0], "/bench-held").Lock(b.Context()))
		m := concurrency.NewMutex(sessions[1], "/bench-held")
		for b.Loop() {
			require.ErrorIs(b, m.TryLock(b.Context()), concurrency.ErrLocked)
		}
	})
}

//go:build linux

package etcdlock_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/redlatch/redlatch/lock"
)

// The benchmarks measure a lock of this package beside concurrency.Mutex of etcd. All callers share one client of etcd. Each
// caller has a session of its own, because a Mutex does not exclude callers with the same one.
//
//	go test -run '^$' -bench . -count 6

// pair is what a caller does: it takes a lock and releases it.
type pair func(ctx context.Context) error

// contenders returns for each library what makes callers of one lock.
func contenders(b *testing.B, etcd *clientv3.Client, name string) map[string]func() pair {
	return map[string]func() pair{
		"etcdlock": func() pair {
			l := locksOf(b, etcd).Lock(name)
			return func(ctx context.Context) error {
				h, err := l.Lock(ctx)
				if err != nil {
					return err
				}
				return h.Unlock(ctx)
			}
		},
		"mutex": func() pair {
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

func benchmark(b *testing.B, name string, callers int) {
	for _, library := range []string{"etcdlock", "mutex"} {
		b.Run(library, func(b *testing.B) {
			etcd := connect(b, shared(b))
			newPair := contenders(b, etcd, name)[library]
			var pairs []pair
			for range callers {
				pairs = append(pairs, newPair())
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
func BenchmarkFree(b *testing.B) { benchmark(b, "bench-free", 1) }

// Two callers pass a lock to each other.
func BenchmarkHandover(b *testing.B) { benchmark(b, "bench-handover", 2) }

// Sixteen callers wait for each other.
func BenchmarkWaiters(b *testing.B) { benchmark(b, "bench-waiters", 16) }

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

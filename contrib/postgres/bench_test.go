package pglock_test

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/lock"
)

// locker acquires a lock and releases it.
type locker func(ctx context.Context) error

// byHand locks with pg_advisory_lock on a connection of its own.
func byHand(b *testing.B, s *server) locker {
	conn, err := pgx.Connect(b.Context(), s.url())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close(context.Background()) })
	return func(ctx context.Context) error {
		if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", int64(7)); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, "SELECT pg_advisory_unlock($1)", int64(7))
		return err
	}
}

func of(l lock.Locker) locker {
	return func(ctx context.Context) error {
		h, err := l.Lock(ctx)
		if err != nil {
			return err
		}
		return h.Unlock(ctx)
	}
}

// Pairs of Lock and Unlock beside pg_advisory_lock and pg_advisory_unlock by hand: of a lock that is free, of two
// clients in turn, and of 16 callers, of one client and of one each.
func BenchmarkPair(b *testing.B) {
	s, err := common()
	if err != nil {
		b.Fatal(err)
	}
	kinds := []struct {
		name    string
		clients bool // callers have clients of their own
		make    func(b *testing.B, pool *pgxpool.Pool) func() locker
	}{
		{"by-hand", true, func(b *testing.B, _ *pgxpool.Pool) func() locker {
			return func() locker { return byHand(b, s) }
		}},
		{"advisory", true, func(b *testing.B, pool *pgxpool.Pool) func() locker {
			return func() locker { return of(advisory.make(b, pool, pglock.TTL(ttl*10)).Lock("bench")) }
		}},
		{"advisory-one-client", false, func(b *testing.B, pool *pgxpool.Pool) func() locker {
			c := advisory.make(b, pool, pglock.TTL(ttl*10))
			return func() locker { return of(c.Lock("bench")) }
		}},
		{"table", true, func(b *testing.B, pool *pgxpool.Pool) func() locker {
			return func() locker { return of(table.make(b, pool, pglock.TTL(ttl*10)).Lock("bench")) }
		}},
	}
	for _, callers := range []struct {
		name string
		n    int
	}{{"free", 1}, {"hand-over", 2}, {"16-waiters", 16}} {
		for _, k := range kinds {
			b.Run(callers.name+"/"+k.name, func(b *testing.B) {
				newLocker := k.make(b, newPool(b, s.addr()))
				var all []locker
				for range callers.n {
					all = append(all, newLocker())
				}
				for _, l := range all { // statements are prepared
					if err := l(b.Context()); err != nil {
						b.Fatal(err)
					}
				}

				b.ResetTimer()
				var done sync.WaitGroup
				for i, l := range all {
					n := b.N / len(all)
					if i < b.N%len(all) {
						n++
					}
					done.Go(func() {
						for range n {
							if err := l(b.Context()); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				done.Wait()
			})
		}
	}
}

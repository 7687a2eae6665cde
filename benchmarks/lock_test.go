package benchmarks

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

var server *redlatchtest.Server

func TestMain(m *testing.M) {
	var err error
	if server, err = redlatchtest.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	server.Close()
	os.Exit(code)
}

// The floor is the work of an uncontended pair on the server and nothing else: two scripts
// that do the same as acquire.lua and release.lua, through rueidis.
var (
	floorAcquire = rueidis.NewLuaScript(`if redis.call('EXISTS', KEYS[1]) == 0 then
redis.call('HSET', KEYS[1], ARGV[2], 1) redis.call('PEXPIRE', KEYS[1], ARGV[1]) return 0 end return 1`)
	floorRelease = rueidis.NewLuaScript(`if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
redis.call('DEL', KEYS[1]) return redis.call('PUBLISH', ARGV[2], '0') end return -1`)
)

func option(b *testing.B) rueidis.ClientOption {
	b.Helper()
	opt, err := rueidis.ParseURL(server.URL())
	if err != nil {
		b.Fatal(err)
	}
	opt.DisableCache, opt.PipelineMultiplex = true, -1
	return opt
}

func conn(b *testing.B) rueidis.Client {
	b.Helper()
	c, err := rueidis.NewClient(option(b))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.Close)
	return c
}

// pairs runs b.N lock-unlock pairs on that many goroutines, each on its own key.
func pairs(b *testing.B, goroutines int, pair func(g int) error) {
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(b.N))
	for g := range goroutines {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := pair(g); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// kinds are the measured locks.
var kinds = []struct {
	name string
	of   func(c *redlatch.Client, name string) lock.Locker
}{
	{"lock", func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) }},
	{"fair", func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) }},
	{"read", func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Read() }},
	{"write", func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() }},
}

func open(b *testing.B) *redlatch.Client {
	b.Helper()
	client, err := redlatch.Open(context.Background(), server.URL())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(client.Close)
	return client
}

// BenchmarkUncontended measures a lock and an unlock without contention.
func BenchmarkUncontended(b *testing.B) {
	for _, goroutines := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("floor/goroutines=%d", goroutines), func(b *testing.B) {
			c, ctx := conn(b), context.Background()
			var n atomic.Uint64
			pairs(b, goroutines, func(g int) error {
				key := "floor-" + strconv.Itoa(g)
				owner := "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11:" + strconv.FormatUint(n.Add(1), 10)
				if err := floorAcquire.Exec(ctx, c, []string{key}, []string{"30000", owner}).Error(); err != nil {
					return err
				}
				return floorRelease.Exec(ctx, c, []string{key}, []string{owner, "redisson_lock__channel:{" + key + "}"}).Error()
			})
		})
		for _, kind := range kinds {
			b.Run(fmt.Sprintf("%s/goroutines=%d", kind.name, goroutines), func(b *testing.B) {
				ctx, client := context.Background(), open(b)
				pairs(b, goroutines, func(g int) error {
					h, err := kind.of(client, kind.name+strconv.Itoa(g)).Lock(ctx)
					if err != nil {
						return err
					}
					return h.Unlock(ctx)
				})
			})
		}
	}
}

// BenchmarkReentry is a Lock and an Unlock of an owner that holds the lock: both are local.
func BenchmarkReentry(b *testing.B) {
	c, err := redlatch.Open(b.Context(), server.URL())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	l := c.Lock("reentered")
	ctx := lock.WithOwner(context.Background(), c.NewOwner())
	held, err := l.Lock(ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		h, err := l.Lock(ctx)
		if err == nil {
			err = h.Unlock(ctx)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	if err := held.Unlock(ctx); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkContended measures many goroutines of one process on one lock.
func BenchmarkContended(b *testing.B) {
	for _, goroutines := range []int{2, 16, 64, 128, 1024} {
		for _, kind := range kinds {
			b.Run(fmt.Sprintf("%s/goroutines=%d", kind.name, goroutines), func(b *testing.B) {
				ctx, l := context.Background(), kind.of(open(b), "contended")
				pairs(b, goroutines, func(int) error {
					h, err := l.Lock(ctx)
					if err != nil {
						return err
					}
					return h.Unlock(ctx)
				})
			})
		}
	}
}

// BenchmarkSemaphore measures an acquisition and a release of one permit: with as many permits
// as goroutines, and with ten contended permits.
func BenchmarkSemaphore(b *testing.B) {
	ctx := context.Background()
	pair := map[string]func(c *redlatch.Client, name string, permits int) (func() error, error){
		"semaphore": func(c *redlatch.Client, name string, permits int) (func() error, error) {
			s := c.Semaphore(name)
			_, err := s.TrySetPermits(ctx, permits)
			return func() error {
				if err := s.Acquire(ctx, 1); err != nil {
					return err
				}
				return s.Release(ctx, 1)
			}, err
		},
		"permits": func(c *redlatch.Client, name string, permits int) (func() error, error) {
			e := c.PermitSemaphore(name)
			_, err := e.TrySetPermits(ctx, permits)
			return func() error {
				p, err := e.Acquire(ctx, 1)
				if err != nil {
					return err
				}
				return p.Release(ctx)
			}, err
		},
	}
	for kind, of := range pair {
		for _, run := range []struct{ permits, goroutines int }{{1, 1}, {64, 64}, {10, 128}} {
			name := fmt.Sprintf("%s/permits=%d/goroutines=%d", kind, run.permits, run.goroutines)
			b.Run(name, func(b *testing.B) {
				do, err := of(open(b), name, run.permits)
				if err != nil {
					b.Fatal(err)
				}
				pairs(b, run.goroutines, func(int) error { return do() })
			})
		}
	}
}

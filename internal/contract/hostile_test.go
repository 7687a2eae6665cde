package contract_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// FuzzReplies has a server answer with replies that no server would give: of any type, length, depth and
// value. No call may panic or block for longer than its context and the patience of Unlock.
//
// The first byte is the kind of object. The others say what the server does with the requests; after
// the last it is honest.
func FuzzReplies(f *testing.F) {
	for seed := range uint64(harness.Size(3, 200)) {
		for kind := range kinds {
			rng := rand.New(rand.NewPCG(seed, uint64(kind)))
			script := make([]byte, 1+rng.IntN(400))
			for i := range script {
				script[i] = byte(rng.Uint32())
			}
			f.Add(byte(kind), script)
		}
	}
	f.Fuzz(func(t *testing.T, kind byte, script []byte) {
		k := kinds[int(kind)%len(kinds)]
		harness.VirtualAlone(t, func(t *testing.T, s *harness.VirtualServer) {
			k.prepareIn(s, "orders")
			c := s.Client(t, quiet, redlatch.WithWatchdogTimeout(time.Second))
			l := &liar{script: script}
			s.Server().SetPreHook(l.lies)
			for _, call := range callsOf(c, k) {
				done := make(chan struct{})
				go func() {
					defer close(done)
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					defer cancel()
					call(ctx)
				}()
				select {
				case <-done:
				case <-time.After(2*patience + 10*time.Second): // a wait, a release, and more
					panic("a call hangs") // with all stacks
				}
			}
			time.Sleep(time.Minute) // renewals and what is repeated in the background
			synctest.Wait()
		})
	})
}

const patience = 2 * time.Second

// callsOf returns calls of all methods that send requests.
func callsOf(c *redlatch.Client, k kind) []func(ctx context.Context) {
	object := k.of(c, "orders")
	calls := []func(ctx context.Context){
		func(ctx context.Context) {
			for _, acquire := range []func(context.Context, ...lock.Option) (lock.Hold, error){harness.Take(object, true), object.Lock} {
				h, err := acquire(ctx)
				if err != nil {
					continue
				}
				time.Sleep(time.Second)
				if k.leased {
					_ = h.Extend(ctx, time.Minute)
				}
				_ = h.Unlock(ctx)
			}
			if h, err := object.TryLock(ctx); err == nil {
				if k.owned {
					_, _ = lock.Detach(ctx, h, time.Minute)
				}
				_ = h.Unlock(ctx)
			}
		},
		func(ctx context.Context) { // several at once, which are passed on or sent together
			var all sync.WaitGroup
			for range 3 {
				all.Go(func() { _ = object.Do(ctx, nothing) })
			}
			all.Wait()
		},
		func(ctx context.Context) { _, _ = c.Probe(ctx) },
	}
	for _, name := range slices.Sorted(maps.Keys(looks(object, lock.Owner{}))) {
		calls = append(calls, func(ctx context.Context) { _ = looks(object, c.NewOwner())[name](ctx) })
	}
	if k.owned {
		calls = append(calls, func(ctx context.Context) { _, _ = k.lock(c, "orders").ForceUnlock(ctx) })
	}
	switch k.name {
	case "lock":
		calls = append(calls, func(ctx context.Context) {
			_, _ = c.Once("orders").Run(ctx, "slot", nothing)
			_, _ = c.Once("orders").Done(ctx, "slot")
			_, _ = c.Once("orders").Forget(ctx, "slot")
			_, _ = c.Once("orders").MarkDone(ctx, "slot")
		})
	case "fenced":
		calls = append(calls, func(ctx context.Context) {
			_, _ = c.FencedLock("orders").RaiseTokens(ctx, 7)
			_, _ = c.FencedLock("orders").ResetTokens(ctx)
		})
	case "fair":
		calls = append(calls, func(ctx context.Context) { _, _ = c.FairLock("orders").Queue(ctx) })
	case "semaphore":
		calls = append(calls, func(ctx context.Context) {
			sem := c.Semaphore("orders", semaphore.Permits(3))
			_, _ = sem.TrySetPermits(ctx, 3)
			_ = sem.Acquire(ctx, 2)
			_ = sem.Release(ctx, 2)
			_ = sem.AddPermits(ctx, 1)
			_, _ = sem.Drain(ctx)
			_, _ = sem.Stats(ctx)
		}, func(ctx context.Context) {
			rate := c.RateLimiter("orders", ratelimit.Rate(2, time.Minute))
			_, _ = rate.TrySetRate(ctx, ratelimit.Config{Rate: 2, Per: time.Minute})
			_, _ = rate.Take(ctx, 1)
			_ = rate.Acquire(ctx, 2)
			_, _ = rate.Release(ctx, 1)
			_, _ = rate.Config(ctx)
			_, _ = rate.Available(ctx)
			_, _ = rate.Delete(ctx)
		})
	case "permit semaphore":
		calls = append(calls, func(ctx context.Context) {
			sem := c.PermitSemaphore("orders", semaphore.Permits(3))
			id := strings.Repeat("00", 16)
			p, err := sem.Acquire(ctx, 2)
			if err == nil {
				_ = p.Release(ctx)
			}
			_, _ = sem.TryRelease(ctx, id)
			_, _ = sem.TTL(ctx, id)
			_, _ = sem.SetTTL(ctx, id, time.Minute)
			_, _ = sem.Adopt(ctx, id+"#1")
			_, _ = sem.Stats(ctx)
		})
	case "latch":
		calls = append(calls, func(ctx context.Context) {
			latch := c.CountDownLatch("orders")
			_, _ = latch.TrySetCount(ctx, 2)
			_, _ = latch.CountDown(ctx)
			_ = latch.Wait(ctx)
			_, _ = latch.Delete(ctx)
		})
	case "election":
		calls = append(calls, func(ctx context.Context) {
			for _, err := range c.Election("orders").Observe(ctx) {
				if err != nil {
					break
				}
			}
		})
	}
	return calls
}

// liar answers requests as its script says.
type liar struct {
	mu     sync.Mutex
	script []byte
}

// next returns the next byte of the script, less than n.
func (l *liar) next(n int) int {
	if len(l.script) == 0 {
		return 0
	}
	b := l.script[0]
	l.script = l.script[1:]
	return int(b) % n
}

// honest are the requests that the driver needs for a connection.
var honest = []string{"HELLO", "CLIENT", "PING", "QUIT", "SUBSCRIBE", "SSUBSCRIBE", "UNSUBSCRIBE", "SUNSUBSCRIBE"}

// lies is a hook of the server.
func (l *liar) lies(p *server.Peer, command string, _ ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.Contains(honest, strings.ToUpper(command)) || l.next(3) == 0 {
		return false
	}
	p.WriteRaw(l.value(0))
	return true
}

// value returns a reply of any form.
func (l *liar) value(depth int) string {
	switch l.next(8) {
	case 0, 1:
		return ":" + l.number() + "\r\n"
	case 2:
		text := []string{"", "x", "OK", "mode", somebody, l.number(), l.number() + " " + l.number()}[l.next(7)]
		return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text)
	case 3:
		return "_\r\n"
	case 4:
		return []string{
			"-ERR no\r\n", "-WRONGTYPE no\r\n", "-NOSCRIPT no\r\n", "-READONLY no\r\n", "-OOM no\r\n", "-LOADING no\r\n",
			"-NOPERM no\r\n", "-BUSY no\r\n", "-\r\n", "+OK\r\n", "#t\r\n", ",nan\r\n", "(12345678901234567890\r\n",
		}[l.next(13)]
	default:
		if depth == 3 {
			return "*0\r\n"
		}
		n := l.next(9)
		text := fmt.Sprintf("*%d\r\n", n)
		for range n {
			text += l.value(depth + 1)
		}
		return text
	}
}

// number returns an integer that is usual, or just outside a range.
func (l *liar) number() string {
	return []string{
		"0", "1", "2", "3", "-1", "-2", "-3", "4", "5", "100", "30000", "2147483647", "2147483648", "9007199254740991",
		"9007199254740992", "9223372036854775807", "-9223372036854775808",
	}[l.next(17)]
}

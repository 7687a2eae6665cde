package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// order has goroutines queue for a fair lock one after the other, those of two clients in
// turn, and counts the goroutines that overtook one that had queued earlier.
func order(ctx context.Context, t task, s service) (job, error) {
	first, ok := s.(*ours)
	if !ok {
		return nil, fmt.Errorf("%s does not list its queue", t.Peer)
	}
	other, err := openRedlatch(ctx, t.Addrs)
	if err != nil {
		return nil, err
	}
	second := other.(*ours)
	lock := first.clients[0].FairLock(t.Name)
	hold, err := lock.Lock(ctx)
	if err != nil {
		return nil, err
	}
	out := &outcome{Queued: t.Goroutines}
	var mu sync.Mutex
	var got []int
	var wg sync.WaitGroup
	for i := range t.Goroutines {
		l := []*ours{first, second}[i%2].clients[0].FairLock(t.Name)
		wg.Go(func() {
			h, err := l.Lock(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.fail(err)
				return
			}
			got = append(got, i)
			if err := h.Unlock(ctx); err != nil {
				out.fail(err)
			}
		})
		for begin := time.Now(); ; time.Sleep(time.Millisecond) {
			queue, err := lock.Queue(ctx)
			if err != nil {
				return nil, err
			}
			if len(queue) == i+1 {
				break
			}
			if time.Since(begin) > 5*time.Second {
				return nil, fmt.Errorf("%d waiters are in the queue, want %d", len(queue), i+1)
			}
		}
	}
	return func() (*outcome, error) {
		defer second.close()
		if err := hold.Unlock(ctx); err != nil {
			return nil, err
		}
		wg.Wait()
		out.Overtook, out.Shares = overtaken(got), []int{len(got)}
		return out, nil
	}, nil
}

// overtaken returns how many numbers precede a smaller one.
func overtaken(got []int) (n int) {
	least := math.MaxInt
	for _, number := range slices.Backward(got) {
		if number > least {
			n++
		}
		least = min(least, number)
	}
	return n
}

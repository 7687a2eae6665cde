package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redlatch/redlatch/countdown"
)

// settling is the time for goroutines to start waiting.
const settling = 300 * time.Millisecond

// latches has goroutines wait for a latch, brings it down to zero from another client, and
// continues with the next latch until the time is over.
func latches(ctx context.Context, t task, s service) (job, error) {
	waiting, ok := s.(*ours)
	if !ok {
		return nil, unsupported(t)
	}
	other, err := openRedlatch(ctx, t.Addrs)
	if err != nil {
		return nil, err
	}
	counting := other.(*ours)
	once := func(name string, out *outcome) error {
		return oneLatch(ctx, waiting.clients[0].CountDownLatch(name), counting.clients[0].CountDownLatch(name), t.Goroutines, out)
	}
	if err := once(t.Name+"-warm", &outcome{}); err != nil {
		return nil, err
	}
	return func() (*outcome, error) {
		defer counting.close()
		out := &outcome{}
		rounds, begin := 0, time.Now()
		for ; rounds == 0 || time.Since(begin) < t.For; rounds++ {
			if err := once(t.Name+"-"+strconv.Itoa(rounds), out); err != nil {
				return nil, err
			}
		}
		out.Elapsed, out.Shares = time.Since(begin), []int{rounds * t.Goroutines}
		return out, nil
	}, nil
}

func oneLatch(ctx context.Context, waiting, counting *countdown.Latch, waiters int, out *outcome) error {
	if ok, err := counting.TrySetCount(ctx, 1); err != nil || !ok {
		return fmt.Errorf("the count is not set: %w", err)
	}
	returned, errs := make([]int64, waiters), make([]error, waiters)
	var wg sync.WaitGroup
	for i := range waiters {
		wg.Go(func() {
			errs[i] = waiting.Wait(ctx)
			returned[i] = monotonic()
		})
	}
	time.Sleep(settling)
	sent := monotonic()
	if _, err := counting.CountDown(ctx); err != nil {
		return err
	}
	wg.Wait()
	var last time.Duration
	for i, at := range returned {
		if errs[i] != nil {
			out.fail(errs[i])
			continue
		}
		took := time.Duration(at - sent)
		out.Wake.add(took)
		last = max(last, took)
	}
	out.Last.add(last)
	return nil
}

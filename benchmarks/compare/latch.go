package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/testserver"
)

// settling is the time for goroutines to start waiting.
const settling = 300 * time.Millisecond

// latches has goroutines of all processes wait for a latch, which the first process brings down
// to zero from another client, and continues with the next latch until the time is over.
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
	latch := func(name string, first bool) *latchRound {
		r := &latchRound{waiting: waiting.clients[0].CountDownLatch(name), addr: t.Addrs[0]}
		if first {
			r.counting = counting.clients[0].CountDownLatch(name)
		}
		return r
	}
	warm := latch(fmt.Sprintf("%s-warm-%d", t.Name, t.Process), true)
	if err := warm.prepare(ctx); err != nil {
		return nil, err
	}
	if err := warm.run(ctx, t.Goroutines, &outcome{}); err != nil {
		return nil, err
	}
	var rounds []*latchRound
	for i := range max(1, (t.For+settling-1)/settling) {
		r := latch(nameOf(t, int(i)), t.Process == 0)
		if err := r.prepare(ctx); err != nil {
			return nil, err
		}
		rounds = append(rounds, r)
	}
	return func() (*outcome, error) {
		defer counting.close()
		out, begin := &outcome{}, time.Now()
		for _, r := range rounds {
			if err := r.run(ctx, t.Goroutines, out); err != nil {
				return nil, err
			}
		}
		out.Elapsed, out.Shares = time.Since(begin), []int{len(rounds) * t.Goroutines}
		return out, nil
	}, nil
}

// latchRound is the use of one latch.
type latchRound struct {
	waiting  *countdown.Latch
	counting *countdown.Latch // nil if another process counts down
	addr     string
}

// prepare sets the count, for all processes.
func (r *latchRound) prepare(ctx context.Context) error {
	if r.counting == nil {
		return nil
	}
	if ok, err := r.counting.TrySetCount(ctx, 1); err != nil || !ok {
		return fmt.Errorf("the count is not set: %w", err)
	}
	return nil
}

func (r *latchRound) run(ctx context.Context, waiters int, out *outcome) error {
	returned, errs := make([]int64, waiters), make([]error, waiters)
	var wg sync.WaitGroup
	for i := range waiters {
		wg.Go(func() {
			errs[i] = r.waiting.Wait(ctx)
			returned[i] = monotonic()
		})
	}
	var sent int64
	if r.counting != nil {
		time.Sleep(settling)
		sent = monotonic()
		if _, err := r.counting.CountDown(ctx); err != nil {
			return err
		}
	}
	wg.Wait()
	sent, err := r.agree(sent)
	if err != nil {
		return err
	}
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

// agree returns when the count down was sent. The process that sent it tells the others on the
// server after its waiters have returned, so that nobody is disturbed before.
func (r *latchRound) agree(sent int64) (int64, error) {
	key := r.waiting.Name() + "-sent"
	if r.counting != nil {
		_, err := testserver.Command(r.addr, "SET", key, strconv.FormatInt(sent, 10))
		return sent, err
	}
	for ; ; time.Sleep(10 * time.Millisecond) {
		said, err := testserver.Query(r.addr, "GET", key)
		if err != nil {
			return 0, err
		}
		if said[0] != "" {
			return strconv.ParseInt(said[0], 10, 64)
		}
	}
}

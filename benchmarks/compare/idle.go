package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// hold acquires one lock for each goroutine and keeps the locks for a while.
func hold(ctx context.Context, t task, s service) (job, error) {
	held, before, err := several(ctx, t, s, t.Goroutines, t.Goroutines)
	if err != nil {
		return nil, err
	}
	if err := take(ctx, t, held); err != nil {
		return nil, err
	}
	out := &outcome{Shares: []int{len(held)}}
	if err := out.remember(before, len(held)); err != nil {
		return nil, err
	}
	return func() (*outcome, error) {
		began := processorTime()
		time.Sleep(t.For)
		out.CPU, out.Elapsed = processorTime()-began, t.For
		runtime.KeepAlive(held)
		return out, nil
	}, nil
}

// wait has goroutines wait for locks that another client holds: all for one, or each for its
// own.
func wait(ctx context.Context, t task, s service) (job, error) {
	holder, err := open(ctx, t)
	if err != nil {
		return nil, err
	}
	locks := 1
	if t.Own {
		locks = t.Goroutines
	}
	held, _, err := several(ctx, t, holder, locks, locks)
	if err != nil {
		return nil, err
	}
	if err := take(ctx, t, held); err != nil {
		return nil, err
	}
	waiters, before, err := several(ctx, t, s, t.Goroutines, locks)
	if err != nil {
		return nil, err
	}
	out := &outcome{Shares: []int{t.Goroutines}}
	if t.Background {
		ctx = context.Background()
	}
	return func() (*outcome, error) {
		ended := make(chan error, t.Goroutines)
		for _, op := range waiters {
			go func() { ended <- op.acquire(ctx) }()
		}
		time.Sleep(t.For) // until they all wait
		for range len(ended) {
			err := <-ended
			if err == nil {
				err = errors.New("a waiter acquired a held lock")
			}
			out.fail(err)
		}
		out.Elapsed = t.For
		err := out.remember(before, t.Goroutines)
		runtime.KeepAlive(held)
		return out, err
	}, nil
}

func nameOf(t task, i int) string { return t.Name + "-" + strconv.Itoa(i) }

// several returns n operations on that many locks, and the memory before what counts.
func several(ctx context.Context, t task, s service, n, locks int) (all []operation, before memory, err error) {
	if before, err = remember(); err != nil {
		return nil, before, err
	}
	all = make([]operation, n)
	for i := range all {
		if all[i], err = s.operation(ctx, t, nameOf(t, i%locks)); err != nil {
			return nil, before, err
		}
	}
	if !t.Whole {
		before, err = remember()
	}
	return all, before, err
}

// take acquires locks, many at a time, within t.Patience. That is no deadline of the
// acquisitions: in some libraries a lock ends with the context it was acquired with.
func take(ctx context.Context, t task, held []operation) error {
	const many = 64
	var taken atomic.Int64
	ended := make(chan error, many)
	for g := range many {
		go func() {
			var err error
			for i := g; i < len(held) && err == nil; i += many {
				err = held[i].acquire(ctx)
				taken.Add(1)
			}
			ended <- err
		}()
	}
	late := time.After(t.Patience)
	for range many {
		select {
		case err := <-ended:
			if err != nil {
				return err
			}
		case <-late:
			return fmt.Errorf("%s of %s were acquired in %v", number(float64(taken.Load()), 0), plural(len(held), "lock"), t.Patience)
		}
	}
	return nil
}

// memory is the memory that this process uses, and its goroutines.
type memory struct{ heap, stacks, resident, goroutines int64 }

func remember() (memory, error) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return memory{}, err
	}
	pages, err := strconv.ParseInt(strings.Fields(string(statm))[1], 10, 64)
	return memory{int64(m.HeapAlloc), int64(m.StackInuse), pages * int64(os.Getpagesize()), int64(runtime.NumGoroutine())}, err
}

// remember sets the memory of each of n new things.
func (o *outcome) remember(before memory, n int) error {
	after, err := remember()
	each := func(before, after int64) float64 { return float64(after-before) / float64(n) }
	o.Heap = each(before.heap, after.heap)
	o.Stacks = each(before.stacks, after.stacks)
	o.Resident = each(before.resident, after.resident)
	o.Goroutines = each(before.goroutines, after.goroutines)
	return err
}

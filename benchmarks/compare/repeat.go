package main

import (
	"cmp"
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// repeat has some goroutines acquire and release over and over again, all the same
// object or each its own. It warms up first, where they contend with another object:
// some libraries leave one in disorder when an acquisition is cancelled, and that is not
// what is measured.
func repeat(ctx context.Context, t task, s service) (job, error) {
	warm := t
	warm.For, warm.Trace = t.For/5, false
	if !t.Own {
		warm.Name += "-warm"
	}
	ops, err := operations(ctx, warm, s)
	if err != nil {
		return nil, err
	}
	if o := contend(warm, ops); o.ops() == 0 && o.Failed > 0 {
		return nil, errors.New(o.Failure)
	}
	if !t.Own {
		ops, err = operations(ctx, t, s)
	}
	return func() (*outcome, error) { return contend(t, ops), nil }, err
}

// operations returns one for each goroutine.
func operations(ctx context.Context, t task, s service) (ops []operation, err error) {
	ops = make([]operation, t.Goroutines)
	for i := range ops {
		name := t.Name
		if t.Own {
			name += "-" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(i)
		}
		if ops[i], err = s.operation(ctx, t, name); err != nil {
			return nil, err
		}
	}
	return ops, nil
}

// contender is a goroutine that does an operation over and over again.
type contender struct {
	task
	op        operation
	latency   histogram
	n, failed int
	failure   error
	got, gave []int64
}

// enough failures end a contender: a library that cannot go on is not to spin.
const enough = 3

// run goes on until ctx ends. Who waits then has waited for at least as long as it has:
// leaving that out would hide the waits that are longest.
func (c *contender) run(ctx context.Context) {
	acquiring := ctx
	if c.Own { // nobody waits, and so nothing has to be cancelled
		acquiring = context.Background()
	}
	for ctx.Err() == nil && c.failed < enough {
		started := time.Now()
		err := c.once(acquiring)
		switch {
		case err == nil:
			c.latency.add(time.Since(started) - c.Hold)
			c.n++
		case ctx.Err() != nil:
			c.latency.add(time.Since(started))
			return
		default:
			c.failed++
			c.failure = cmp.Or(c.failure, err)
		}
		if c.Rest > 0 {
			time.Sleep(c.Rest)
		}
	}
}

func (c *contender) once(ctx context.Context) error {
	if err := c.op.acquire(ctx); err != nil {
		return err
	}
	if c.Trace {
		c.got = append(c.got, monotonic())
	}
	if c.Hold > 0 {
		time.Sleep(c.Hold)
	}
	if c.Trace {
		c.gave = append(c.gave, monotonic())
	}
	return c.op.release(context.Background())
}

// contend has every contender do its operation until the time is over.
func contend(t task, ops []operation) *outcome {
	all := make([]*contender, len(ops))
	for i, op := range ops {
		all[i] = &contender{task: t, op: op}
		if t.Trace {
			all[i].got, all[i].gave = make([]int64, 0, 10_000), make([]int64, 0, 10_000)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for _, c := range all {
		wg.Go(func() {
			<-begin
			c.run(ctx)
		})
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	started := time.Now()
	close(begin)
	time.Sleep(t.For)
	runtime.ReadMemStats(&after) // what cancelling costs is not that of an operation
	cancel()
	wg.Wait()
	out := &outcome{Elapsed: time.Since(started)}
	out.Allocs, out.Bytes = after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
	for _, c := range all {
		out.Latency.merge(&c.latency)
		out.Shares = append(out.Shares, c.n)
		out.Failed += c.failed
		if c.failure != nil && out.Failure == "" {
			out.Failure = c.failure.Error()
		}
		out.Got, out.Gave = append(out.Got, c.got...), append(out.Gave, c.gave...)
	}
	return out
}

package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// repeat has several goroutines acquire and release in a loop, all the same object or each its
// own. They warm up on another object, because some libraries leave an object in disorder when
// an acquisition is canceled.
func repeat(ctx context.Context, t task, s service) (job, error) {
	if t.Overheard {
		if err := overhear(ctx, t.Addrs[0]); err != nil {
			return nil, err
		}
	}
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
	for _, op := range ops {
		if late, ok := op.(interface{ settle() }); ok {
			late.settle()
		}
	}
	if !t.Own {
		ops, err = operations(ctx, t, s)
	}
	return func() (*outcome, error) { return contend(t, ops), nil }, err
}

// overhear subscribes to all channels until ctx is done.
func overhear(ctx context.Context, addr string) error {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	if _, err := io.WriteString(conn, "PSUBSCRIBE *\r\n"); err != nil {
		return err
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil { // the confirmation
		return err
	}
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	return nil
}

// operations returns one operation for each goroutine.
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

// contender is a goroutine that repeats an operation.
type contender struct {
	task
	op        operation
	latency   histogram
	n, failed int
	failure   error
	ended     time.Time // its last operation
	got, gave []int64
}

// enough failures end a contender, so that a broken library does not spin.
const enough = 3

// run repeats until ctx is done. A waiter at the end has waited for at least that long;
// omitting it would hide the longest waits. Each contender has contexts of its own, like the
// requests of a service.
func (c *contender) run(ctx context.Context) {
	parent := ctx
	if c.Own { // nothing waits, and libraries may leave the lock of a canceled acquisition held
		parent = context.Background()
	}
	acquiring, cancel := context.WithCancel(parent)
	defer cancel()
	releasing, cancel := context.WithCancel(context.Background())
	defer cancel()
	if c.Background {
		acquiring, releasing = context.Background(), context.Background()
	}
	for ctx.Err() == nil && c.failed < enough {
		started := time.Now()
		err := c.once(acquiring, releasing)
		switch {
		case err == nil:
			c.ended = time.Now()
			c.latency.add(c.ended.Sub(started) - c.Hold)
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

func (c *contender) once(acquiring, releasing context.Context) error {
	if err := c.op.acquire(acquiring); err != nil {
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
	return c.op.release(releasing)
}

// contend has every contender repeat its operation until the time is over.
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
	started, used := time.Now(), processorTime()
	close(begin)
	time.Sleep(t.For)
	runtime.ReadMemStats(&after) // the cost of cancelling is not that of an operation
	used = processorTime() - used
	cancel()
	wg.Wait()
	out := &outcome{Elapsed: t.For, CPU: used}
	out.Allocs, out.Bytes = after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
	for _, c := range all {
		out.Elapsed = max(out.Elapsed, c.ended.Sub(started)) // how long waiters take to give up does not count
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

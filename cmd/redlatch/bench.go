package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// benchCommand is "redlatch bench".
type benchCommand struct {
	connection *connection

	length  time.Duration
	callers int
	json    bool
}

func newBench(c *connection) *cobra.Command {
	b := &benchCommand{connection: c}
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure locks on the server",
		Long: `Measure locks on the server, with some connections and goroutines of this process.

The output is a table with a line for each measurement: how often it was done per second, the
median and the 99th percentile of its duration, and the median in round trips.

  round trip     a PING, one at a time: the floor of everything else
  lock + unlock  of a lock of each kind, one at a time, without others who want it
  contended      goroutines of one process that pass a lock on: the duration is the wait of one
  hand-over      from the call of Unlock by a client until another client, which waits, has the lock

bench loads the server like a busy program. It uses random names that begin with redlatch-bench,
and leaves nothing behind, unless it is killed or the server fails. Then its locks expire after 30 s,
and a counter of fencing tokens stays.

` + statusHelpOf("measured", "") + `
  128 + n  signal n ended it`,
		Example: `  redlatch bench --url redis://db:6379
  redlatch bench --for 5s --goroutines 64 --json`,
		Args:              arguments(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              b.run,
	}
	f := cmd.Flags()
	f.DurationVar(&b.length, "for", 30*time.Second, "length of all measurements together")
	f.IntVar(&b.callers, "goroutines", 16, "number of goroutines that contend for a lock")
	f.BoolVar(&b.json, "json", false, "print JSON")
	return cmd
}

// measurement is a line of the table. Its durations are in seconds.
type measurement struct {
	What       string  `json:"what"`
	Kind       string  `json:"kind,omitempty"`
	Count      int     `json:"count"`
	Rate       float64 `json:"per_second"`
	Median     float64 `json:"median_seconds"`
	P99        float64 `json:"p99_seconds"`
	RoundTrips float64 `json:"round_trips"`
}

// What is measured.
const (
	ofRoundTrip = "round trip"
	ofPairs     = "lock + unlock"
	ofContended = "contended"
	ofHandOver  = "hand-over"
)

// bencher measures on a server.
type bencher struct {
	clients [2]*redlatch.Client
	prefix  string // of the names
	callers int
}

// lock returns the lock of a kind that all measurements of that kind use.
func (b *bencher) lock(client int, kind string) lock.Locker {
	return (&lockCommand{kind: kind}).one(b.clients[client], b.prefix+kind)
}

// task is a measurement that runs until ctx ends and returns all durations.
type task struct {
	what, kind string
	run        func(ctx context.Context) ([]time.Duration, error)
}

func (b *bencher) tasks() []task {
	all := []task{{ofRoundTrip, "", func(ctx context.Context) ([]time.Duration, error) {
		return repeat(ctx, func(ctx context.Context) error { return b.clients[0].Ping(ctx) })
	}}}
	for _, kind := range kinds {
		all = append(all, task{ofPairs, kind, func(ctx context.Context) ([]time.Duration, error) { return b.pairs(ctx, kind) }})
	}
	for _, kind := range []string{"lock", "fair"} {
		all = append(all, task{ofContended, kind, func(ctx context.Context) ([]time.Duration, error) { return b.contended(ctx, kind) }})
	}
	for _, kind := range []string{"lock", "fair"} {
		all = append(all, task{ofHandOver, kind, func(ctx context.Context) ([]time.Duration, error) { return b.handOvers(ctx, kind) }})
	}
	return all
}

// repeat measures f until ctx ends.
func repeat(ctx context.Context, f func(ctx context.Context) error) (all []time.Duration, err error) {
	for ctx.Err() == nil {
		began := time.Now()
		if err := f(ctx); err != nil {
			return all, unlessOver(ctx, err)
		}
		all = append(all, time.Since(began))
	}
	return all, nil
}

// unlessOver returns err, or nil if the end of the measurement has caused it.
func unlessOver(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil
	}
	return err
}

func (b *bencher) pairs(ctx context.Context, kind string) ([]time.Duration, error) {
	l := b.lock(0, kind)
	return repeat(ctx, func(ctx context.Context) error {
		h, err := l.Lock(ctx)
		if err != nil {
			return err
		}
		return h.Unlock(ctx)
	})
}

func (b *bencher) contended(ctx context.Context, kind string) ([]time.Duration, error) {
	l := b.lock(0, kind)
	waits, errs := make([][]time.Duration, b.callers), make([]error, b.callers)
	var wg sync.WaitGroup
	for i := range b.callers {
		wg.Go(func() {
			for ctx.Err() == nil && errs[i] == nil {
				began := time.Now()
				h, err := l.Lock(ctx)
				if err != nil {
					errs[i] = unlessOver(ctx, err)
					return
				}
				waits[i] = append(waits[i], time.Since(began))
				errs[i] = h.Unlock(ctx)
			}
		})
	}
	wg.Wait()
	return slices.Concat(waits...), errors.Join(errs...)
}

func (b *bencher) handOvers(ctx context.Context, kind string) (all []time.Duration, err error) {
	h, err := b.lock(0, kind).Lock(ctx)
	if err != nil {
		return nil, unlessOver(ctx, err)
	}
	type acquired struct {
		hold lock.Hold
		err  error
		at   time.Time
	}
	for holder := 0; ; holder = 1 - holder {
		next := make(chan acquired, 1)
		go func() {
			h, err := b.lock(1-holder, kind).Lock(ctx)
			next <- acquired{h, err, time.Now()}
		}()
		b.awaitWaiter(ctx, b.clients[1-holder])
		released := time.Now()
		err := h.Unlock(ctx)
		a := <-next
		if a.err != nil {
			return all, errors.Join(err, unlessOver(ctx, a.err))
		}
		if h = a.hold; err != nil || ctx.Err() != nil {
			return all, errors.Join(err, h.Unlock(ctx))
		}
		all = append(all, a.at.Sub(released))
	}
}

// awaitWaiter waits until a call of the client waits for a message, and so does its last attempt
// before that.
func (b *bencher) awaitWaiter(ctx context.Context, client *redlatch.Client) {
	for quiet := 0; quiet < 3 && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		if s := client.Stats(); s.Waiting == 1 && s.Attempting == 0 && client.Stats().PubSub.Subscribed > 0 {
			quiet++
		} else {
			quiet = 0
		}
	}
}

// measure runs all tasks, for that long together, and reports each.
func (b *bencher) measure(ctx context.Context, length time.Duration, report func(measurement) error) error {
	tasks, roundTrip := b.tasks(), time.Duration(0)
	for _, t := range tasks {
		limited, cancel := context.WithTimeout(ctx, length/time.Duration(len(tasks)))
		began := time.Now()
		all, err := t.run(limited)
		took := time.Since(began)
		cancel()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // a signal
		}
		if err != nil {
			return fmt.Errorf("%s: %w", strings.TrimSpace(t.what+" "+t.kind), err)
		}
		if len(all) == 0 {
			continue // the time was too short
		}
		slices.Sort(all)
		median := all[len(all)/2]
		roundTrip = cmp.Or(roundTrip, median)
		if err := report(measurement{
			What: t.what, Kind: t.kind, Count: len(all), Rate: float64(len(all)) / took.Seconds(),
			Median: median.Seconds(), P99: all[len(all)*99/100].Seconds(), RoundTrips: median.Seconds() / roundTrip.Seconds(),
		}); err != nil {
			return err
		}
	}
	return nil
}

// clean removes what the measurements have left.
func (b *bencher) clean(ctx context.Context) error {
	// The counter of the tokens never expires.
	_, err := b.clients[0].FencedLock(b.prefix + "fenced").ResetTokens(ctx)
	for _, client := range b.clients {
		err = errors.Join(err, client.Shutdown(ctx))
	}
	return err
}

func (b *benchCommand) run(*cobra.Command, []string) error {
	switch {
	case b.length < time.Second:
		return fmt.Errorf("--for %v: must be at least 1s", b.length)
	case b.callers < 1:
		return fmt.Errorf("--goroutines %d: must be at least 1", b.callers)
	}
	return interruptible(cleanupTime, b.bench)
}

// cleanupTime bounds how long bench continues after a signal, to remove its keys.
const cleanupTime = 2 * time.Second

// bench measures until ctx ends, and cleans up.
func (b *benchCommand) bench(ctx context.Context) (err error) {
	bench := &bencher{prefix: "redlatch-bench-" + rand.Text() + ":", callers: b.callers}
	for i := range bench.clients {
		if bench.clients[i], err = b.connection.open(ctx, b.connection.address()); err != nil {
			return err
		}
		defer bench.clients[i].Close()
	}
	all := []measurement(nil)
	row := func(cells ...any) error {
		if b.json {
			return nil
		}
		_, err := fmt.Printf("%-14s %-6s %11s %11s %11s %12s\n", cells...)
		return err
	}
	if err := row("", "", "per second", "median", "p99", "round trips"); err != nil {
		return err
	}
	err = bench.measure(ctx, b.length, func(m measurement) error {
		all = append(all, m)
		return row(m.What, m.Kind, fmt.Sprintf("%.0f", m.Rate), micros(m.Median), micros(m.P99), fmt.Sprintf("%.1f", m.RoundTrips))
	})
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if err = cmp.Or(err, bench.clean(clean)); err != nil || ctx.Err() != nil || !b.json {
		return err
	}
	e := newEncoder(os.Stdout)
	e.SetIndent("", "  ")
	return e.Encode(map[string]any{"goroutines": b.callers, "measurements": all})
}

// micros formats seconds.
func micros(seconds float64) string { return fmt.Sprintf("%.0f µs", seconds*1e6) }

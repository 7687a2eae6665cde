// Trace prints the trace of two processes that contend for a lock. The first holds it; the
// second waits until the message of its release wakes it. Each process records its spans
// with the OpenTelemetry SDK; the trace context travels from this program to both, so all
// spans form one trace.
//
//	go run ./examples/trace
//
// It uses the server at REDIS_URL if that is set, and starts one otherwise.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/examples/internal/demo"
)

func main() {
	worker := flag.String("worker", "", "internal: run as the worker of that name")
	flag.Parse()
	err := error(nil)
	if *worker != "" {
		err = work(context.Background(), *worker)
	} else {
		err = run(context.Background())
	}
	if err != nil {
		log.Fatal(err)
	}
}

// span is the printed part of a span.
type span struct {
	ID, Parent string
	Name       string
	Start, End time.Time
	Notes      []string
	Events     []span
}

func (s span) said() string { return strings.Join(append([]string{s.Name}, s.Notes...), " ") }

// collector is an exporter that keeps ended spans.
type collector struct{ spans []span }

func (c *collector) ExportSpans(_ context.Context, ended []sdk.ReadOnlySpan) error {
	for _, s := range ended {
		out := span{
			ID: s.SpanContext().SpanID().String(), Parent: s.Parent().SpanID().String(),
			Name: s.Name(), Start: s.StartTime(), End: s.EndTime(),
		}
		for _, a := range s.Attributes() {
			out.Notes = append(out.Notes, strings.TrimPrefix(string(a.Key), "redlatch.")+"="+a.Value.String())
		}
		for _, e := range s.Events() {
			event := span{Name: e.Name, Start: e.Time}
			for _, a := range e.Attributes {
				event.Notes = append(event.Notes, "by "+a.Value.String())
			}
			out.Events = append(out.Events, event)
		}
		c.spans = append(c.spans, out)
	}
	return nil
}

func (c *collector) Shutdown(context.Context) error { return nil }

// The trace context travels as a W3C traceparent, in the environment.
const traceparent = "TRACEPARENT"

var propagator = propagation.TraceContext{}

// work is a worker process: it works under the lock until told to end, and then prints its
// spans. It reports when it holds the lock and when it waits for it.
func work(ctx context.Context, name string) error {
	var spans collector
	tracers := sdk.NewTracerProvider(sdk.WithSyncer(&spans))
	tracer := tracers.Tracer("example")
	ctx = propagator.Extract(ctx, propagation.MapCarrier{"traceparent": os.Getenv(traceparent)})
	client, err := redlatch.Open(ctx, os.Getenv("REDIS_URL"), redlatch.WithTracerProvider(tracers))
	if err != nil {
		return err
	}
	defer client.Close()

	ctx, process := tracer.Start(ctx, "process "+name)
	ended := make(chan struct{})
	go func() {
		for client.Stats().Waiting == 0 || client.PubSub().Subscribed == 0 {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
		fmt.Println("waiting")
	}()
	err = client.Lock("orders").Do(ctx, func(ctx context.Context) error {
		fmt.Println("holding")
		_, step := tracer.Start(ctx, "work")
		defer step.End()
		_, err := io.Copy(io.Discard, os.Stdin) // until the parent process closes it
		time.Sleep(100 * time.Millisecond)
		return err
	})
	close(ended)
	process.End()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(spans.spans)
}

// run starts the processes and prints their trace.
func run(ctx context.Context) error {
	url, stop, err := demo.Server()
	if err != nil {
		return err
	}
	defer stop()
	var mine collector
	tracer := sdk.NewTracerProvider(sdk.WithSyncer(&mine)).Tracer("example")
	ctx, root := tracer.Start(ctx, "main")
	carrier := propagation.MapCarrier{}
	propagator.Inject(ctx, carrier)

	var workers []*worker
	for _, name := range []string{"1", "2"} {
		w, err := start(ctx, name, "REDIS_URL="+url, traceparent+"="+carrier["traceparent"])
		if err != nil {
			return err
		}
		workers = append(workers, w)
		// The first keeps the lock until the second waits for it.
		if _, err := w.out.ReadString('\n'); err != nil {
			return fmt.Errorf("process %s: %w", name, err)
		}
	}
	var spans []span
	for _, w := range workers {
		theirs, err := w.finish()
		if err != nil {
			return err
		}
		spans = append(spans, theirs...)
	}
	root.End()
	spans = append(spans, mine.spans...)
	slices.SortFunc(spans, func(a, b span) int { return a.Start.Compare(b.Start) })
	fmt.Printf("trace %s\n\n%10s %10s\n", root.SpanContext().TraceID(), "from ms", "to ms")
	show(spans, root.SpanContext().SpanID().String(), "", spans[0].Start)
	return nil
}

// worker is a process running work.
type worker struct {
	cmd *exec.Cmd
	in  io.Closer
	out *bufio.Reader
}

func start(ctx context.Context, name string, env ...string) (*worker, error) {
	cmd := exec.CommandContext(ctx, os.Args[0], "-worker", name)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &worker{cmd, in, bufio.NewReader(out)}, cmd.Start()
}

// finish ends the worker and returns its spans.
func (w *worker) finish() (spans []span, err error) {
	if err := w.in.Close(); err != nil {
		return nil, err
	}
	for {
		line, err := w.out.ReadBytes('\n')
		if err != nil {
			return nil, err
		}
		if bytes.HasPrefix(line, []byte("[")) {
			if err := json.Unmarshal(line, &spans); err != nil {
				return nil, err
			}
			return spans, w.cmd.Wait()
		}
	}
}

// show prints the spans below a parent, with events among their children.
func show(spans []span, parent, indent string, zero time.Time) {
	for _, s := range spans {
		if s.Parent != parent {
			continue
		}
		fmt.Printf("%10.1f %10.1f  %s%s\n", ms(s.Start.Sub(zero)), ms(s.End.Sub(zero)), indent, s.said())
		for _, e := range s.Events {
			fmt.Printf("%10.1f %10s  %s  · %s\n", ms(e.Start.Sub(zero)), "", indent, e.said())
		}
		show(spans, s.ID, indent+"  ", zero)
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

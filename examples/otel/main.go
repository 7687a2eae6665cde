// Otel exports the spans and metrics of two clients that contend for a lock, with the
// exporters of OpenTelemetry for standard output. Replace them by those of OTLP to send the
// same data to a collector.
//
//	cd examples/otel && go run . -url redis://localhost:6379
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"log"
	"os"
	"time"

	"go.opentelemetry.io/otel/exporters/stdout/stdoutmetric"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/redlatch/redlatch"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	if err := run(context.Background(), *url); err != nil {
		log.Fatal(err)
	}
}

// run exports everything before it returns, also after an error.
func run(ctx context.Context, url string) (err error) {
	spans, err := stdouttrace.New(stdouttrace.WithPrettyPrint())
	if err != nil {
		return err
	}
	numbers, err := stdoutmetric.New(stdoutmetric.WithPrettyPrint())
	if err != nil {
		return err
	}
	tracers := trace.NewTracerProvider(trace.WithBatcher(spans))
	meters := metric.NewMeterProvider(metric.WithReader(metric.NewPeriodicReader(numbers)))
	defer func() { err = errors.Join(err, tracers.Shutdown(ctx), meters.Shutdown(ctx)) }()

	var clients []*redlatch.Client // as of two processes
	for range 2 {
		client, err := redlatch.Open(ctx, url, redlatch.WithTracerProvider(tracers), redlatch.WithMeterProvider(meters))
		if err != nil {
			return err
		}
		defer client.Close()
		clients = append(clients, client)
	}
	return contend(ctx, tracers, clients[0], clients[1])
}

// contend has the second client wait until the first releases the lock.
func contend(ctx context.Context, tracers *trace.TracerProvider, first, second *redlatch.Client) error {
	ctx, span := tracers.Tracer("example").Start(ctx, "contend")
	defer span.End()
	hold, err := first.Lock("orders").Lock(ctx)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- second.Lock("orders").Do(ctx, work) }()
	err = errors.Join(work(hold.Context()), hold.Unlock(ctx))
	return errors.Join(err, <-ended)
}

func work(ctx context.Context) error {
	select {
	case <-time.After(300 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

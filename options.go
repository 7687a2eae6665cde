package redlatch

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// Option configures a Client.
type Option func(*config) error

// option returns an Option that calls set, or if its value is not valid fails with that text.
func option(valid bool, set func(*config), format string, args ...any) Option {
	return func(c *config) error {
		if !valid {
			return fmt.Errorf("%w: %s", lock.ErrInvalid, fmt.Sprintf(format, args...))
		}
		set(c)
		return nil
	}
}

// config holds the settings of a client. Only some fields of the session's are set.
type config struct {
	session.Config
	mode          pubsub.Mode
	tracers       trace.TracerProvider
	meters        metric.MeterProvider
	metricName    func(string) string
	startupChecks bool
}

// Defaults. They are Redisson's, except for DefaultTurn.
const (
	DefaultWatchdogTimeout = 30 * time.Second
	DefaultFairWaitTimeout = 5 * time.Minute
	DefaultTurn            = 10 * time.Millisecond
)

// minWatchdogTimeout leaves time for several renewal attempts within a lease.
const minWatchdogTimeout = 100 * time.Millisecond

func newConfig(ctx context.Context, opts []Option) (config, error) {
	if err := session.CheckContext(ctx); err != nil {
		return config{}, ofClient.Refused("connect", err)
	}

	// Redisson's ids have version 4, so the version tells operators the library of a holder.
	c := config{startupChecks: true, Config: session.Config{
		ID:              uuid.Must(uuid.NewV7()).String(),
		WatchdogTimeout: DefaultWatchdogTimeout,
		FairWait:        DefaultFairWaitTimeout,
		Turn:            DefaultTurn,
		MapName:         func(name string) string { return name },
		Logger:          slog.Default(),
		ReplyTimeout:    defaultResponseTimeout,
	}}
	for _, opt := range opts {
		if opt == nil {
			return config{}, ofClient.Refused("connect", fmt.Errorf("%w: a nil option", lock.ErrInvalid))
		}
		if err := opt(&c); err != nil {
			return config{}, ofClient.Refused("connect", err)
		}
	}

	return c, nil
}

// WithWatchdogTimeout sets the lease of locks acquired without one. The lease is
// renewed after a third of that time, and ends that long after its process died. The
// default is 30 s, the minimum 100 ms. Redisson calls it lockWatchdogTimeout; clients
// may use different timeouts.
//
// A timeout should be at least six round trips to the server, so that a renewal without a reply can be
// repeated; the startup checks warn of a shorter one. Below two round trips, which a request to load a script
// adds to, every hold is lost before its renewal is confirmed.
func WithWatchdogTimeout(d time.Duration) Option {
	return option(d >= minWatchdogTimeout && d <= lock.MaxLease, func(c *config) { c.WatchdogTimeout = d },
		"watchdog timeout %v: must be from %v to %v", d, minWatchdogTimeout, lock.MaxLease)
}

// WithFairWaitTimeout sets the time that each waiter in the queue of a fair lock adds
// to the deadlines that Java clients compute. It should equal their
// fairLockWaitTimeout; the default, 5 minutes, is Redisson's, and the minimum is a
// second. redlatch removes its own dead waiters much sooner: see package fairlock.
func WithFairWaitTimeout(d time.Duration) Option {
	return option(d >= time.Second, func(c *config) { c.FairWait = d },
		"fair wait timeout %v: must be a second or more", d)
}

// WithNameMapper sets the function that maps names to keys, for example to add a
// prefix. Channels and helper keys are derived from the mapped name. Redisson calls it
// nameMapper. f is called once per object, must be fast, and must return the same key
// for the same name in every process.
func WithNameMapper(f func(name string) string) Option {
	return option(f != nil, func(c *config) { c.MapName = f }, "the name mapper is nil")
}

// WithStrictNames refuses names that make two objects share keys, and long ones: the methods of the object
// return an error that matches lock.ErrInvalid. It is for programs whose users choose names. What is refused
// is judged by the key that the name is mapped to:
//
//   - {x}, because in Redisson's format it has the helper keys of x
//   - what begins with redisson_ or redlatch_, or is like {x}:timeout, {x}:value or {x}:permits, because
//     that may be a helper key of another object
//   - more than 512 bytes
func WithStrictNames() Option {
	return option(true, func(c *config) { c.StrictNames = true }, "")
}

// WithPubSubMode sets the kind of pub/sub, which must be the same in all processes that
// share locks. The default, pubsub.Auto, follows Redisson. Without a cluster, New
// rejects pubsub.Sharded.
func WithPubSubMode(m pubsub.Mode) Option {
	return option(m <= pubsub.Plain, func(c *config) { c.mode = m }, "pub/sub mode %d", m)
}

// WithTurn sets how long this process may keep a lock, or the permits of a semaphore, by passing them on among its
// callers, while other processes may wait for them. Passing a lock on within the process is faster than a release. When
// the turn is over, the process leaves the lock to the others, for as long as it has had it itself, times their
// number: until then it tries only if the lock has been free for 5 ms, or for up to 80 ms if other processes have been
// slower. If no other process takes the lock meanwhile, the next turn lasts for at least 25 ms, and then for four times as
// long, up to 1.6 s. The default is 10 ms; 0 turns hand-offs off. It does not apply to fair locks, whose order the server keeps.
func WithTurn(d time.Duration) Option {
	return option(d >= 0, func(c *config) { c.Turn = d }, "turn of %v is negative", d)
}

// WithLogger sets the logger for problems: failed renewals, holds dropped without
// Unlock, lost connections. The default is slog.Default().
func WithLogger(l *slog.Logger) Option {
	return option(l != nil, func(c *config) { c.Logger = l },
		"the logger is nil; slog.New(slog.DiscardHandler) drops everything")
}

// WithTracerProvider sets the provider for spans. The default is OpenTelemetry's global
// provider, if one is set when the client is created.
func WithTracerProvider(p trace.TracerProvider) Option {
	return option(true, func(c *config) { c.tracers = p }, "")
}

// WithMeterProvider sets the provider for metrics. The default is OpenTelemetry's
// global provider, if one is set when the client is created.
func WithMeterProvider(p metric.MeterProvider) Option {
	return option(true, func(c *config) { c.meters = p }, "")
}

// WithMetricName adds the names of locks to metrics, as the attribute redlatch.name.
// They are omitted by default because each name is a time series of its own. f maps a
// name to the attribute, for example by removing an order number; it must be fast, and
// "" omits the attribute. Metrics that concern no single lock never have it.
func WithMetricName(f func(name string) string) Option {
	return option(f != nil, func(c *config) { c.metricName = f }, "the function for names in metrics is nil")
}

// WithoutStartupChecks disables the checks of New, Open and Wrap: whether a server may
// evict locks, is too old, has a clock that is far off, is too far away for the watchdog timeout, or
// denies this user the use of locks. The checks log warnings and never fail. Disable them in programs that are too
// short-lived for a few extra round trips; Client.Probe does the same on demand.
func WithoutStartupChecks() Option {
	return option(true, func(c *config) { c.startupChecks = false }, "")
}

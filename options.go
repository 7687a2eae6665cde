package redlatch

import (
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// Option configures a Client.
type Option func(*config) error

// config holds the settings of a client.
type config struct {
	watchdogTimeout time.Duration
	fairWait        time.Duration
	handOffs        int
	mapName         func(string) string
	mode            pubsub.Mode
	logger          *slog.Logger
	tracers         trace.TracerProvider
	meters          metric.MeterProvider
	metricName      func(string) string
	startupChecks   bool
	replyTimeout    time.Duration // not an option; see New and Wrap
}

// Defaults. They are Redisson's, except for DefaultHandOffLimit.
const (
	DefaultWatchdogTimeout = 30 * time.Second
	DefaultFairWaitTimeout = 5 * time.Minute
	DefaultHandOffLimit    = 16
)

// minWatchdogTimeout leaves time for several renewal attempts within a lease.
const minWatchdogTimeout = 100 * time.Millisecond

func newConfig(opts []Option) (config, error) {
	c := config{
		watchdogTimeout: DefaultWatchdogTimeout,
		fairWait:        DefaultFairWaitTimeout,
		handOffs:        DefaultHandOffLimit,
		mapName:         func(name string) string { return name },
		logger:          slog.Default(),
		startupChecks:   true,
		replyTimeout:    defaultResponseTimeout,
	}
	for _, opt := range opts {
		if opt == nil {
			return config{}, fmt.Errorf("%w: a nil option", lock.ErrInvalid)
		}
		if err := opt(&c); err != nil {
			return config{}, err
		}
	}
	return c, nil
}

// WithWatchdogTimeout sets the lease of locks acquired without one. The lease is
// renewed after a third of that time, and ends that long after its process died. The
// default is 30 s, the minimum 100 ms. Redisson calls it lockWatchdogTimeout; clients
// may use different timeouts.
func WithWatchdogTimeout(d time.Duration) Option {
	return func(c *config) error {
		if d < minWatchdogTimeout || d > lock.MaxLease {
			return fmt.Errorf("%w: watchdog timeout %v: must be from %v to %v", lock.ErrInvalid, d, minWatchdogTimeout, lock.MaxLease)
		}
		c.watchdogTimeout = d
		return nil
	}
}

// WithFairWaitTimeout sets the time that each waiter in the queue of a fair lock adds
// to the deadlines that Java clients compute. It should equal their
// fairLockWaitTimeout; the default, 5 minutes, is Redisson's, and the minimum is a
// second. redlatch removes its own dead waiters much sooner: see package fairlock.
func WithFairWaitTimeout(d time.Duration) Option {
	return func(c *config) error {
		if d < time.Second {
			return fmt.Errorf("%w: fair wait timeout %v: must be a second or more", lock.ErrInvalid, d)
		}
		c.fairWait = d
		return nil
	}
}

// WithNameMapper sets the function that maps names to keys, for example to add a
// prefix. Channels and helper keys are derived from the mapped name. Redisson calls it
// nameMapper. f is called once per object, must be fast, and must return the same key
// for the same name in every process.
func WithNameMapper(f func(name string) string) Option {
	return func(c *config) error {
		if f == nil {
			return fmt.Errorf("%w: the name mapper is nil", lock.ErrInvalid)
		}
		c.mapName = f
		return nil
	}
}

// WithPubSubMode sets the kind of pub/sub, which must be the same in all processes that
// share locks. The default, pubsub.Auto, follows Redisson. Without a cluster, New
// rejects pubsub.Sharded.
func WithPubSubMode(m pubsub.Mode) Option {
	return func(c *config) error {
		if m > pubsub.Plain {
			return fmt.Errorf("%w: pub/sub mode %d", lock.ErrInvalid, m)
		}
		c.mode = m
		return nil
	}
}

// WithHandOffLimit sets how many times in a row the waiters of this process may acquire a
// lock before they pause, until another process has released it or for 20 ms. Passing a
// lock on within the process is faster than a release, and the limit bounds the wait of
// other processes. If no other process acquires the lock meanwhile, the number doubles, up
// to 64 times, but the process still pauses after every 50 ms of holding. The default is
// 16; 0 disables hand-offs. It does not apply to fair locks, whose order the server keeps.
func WithHandOffLimit(n int) Option {
	return func(c *config) error {
		if n < 0 {
			return fmt.Errorf("%w: hand-off limit %d is negative", lock.ErrInvalid, n)
		}
		c.handOffs = n
		return nil
	}
}

// WithLogger sets the logger for problems: failed renewals, holds dropped without
// Unlock, lost connections. The default is slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(c *config) error {
		if l == nil {
			return fmt.Errorf("%w: the logger is nil; slog.New(slog.DiscardHandler) drops everything", lock.ErrInvalid)
		}
		c.logger = l
		return nil
	}
}

// WithTracerProvider sets the provider for spans. The default is OpenTelemetry's global
// provider, if one is set when the client is created.
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(c *config) error {
		c.tracers = p
		return nil
	}
}

// WithMeterProvider sets the provider for metrics. The default is OpenTelemetry's
// global provider, if one is set when the client is created.
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(c *config) error {
		c.meters = p
		return nil
	}
}

// WithMetricName adds the names of locks to metrics, as the attribute redlatch.name.
// They are omitted by default because each name is a time series of its own. f maps a
// name to the attribute, for example by removing an order number; it must be fast, and
// "" omits the attribute. Metrics that concern no single lock never have it.
func WithMetricName(f func(name string) string) Option {
	return func(c *config) error {
		if f == nil {
			return fmt.Errorf("%w: the function for names in metrics is nil", lock.ErrInvalid)
		}
		c.metricName = f
		return nil
	}
}

// WithoutStartupChecks disables the checks of New, Open and Wrap: whether a server may
// evict locks, is too old, has a clock that is far off, or denies this user the use of
// locks. The checks log warnings and never fail. Disable them in programs that are too
// short-lived for a few extra round trips; Client.Probe does the same on demand.
func WithoutStartupChecks() Option {
	return func(c *config) error {
		c.startupChecks = false
		return nil
	}
}

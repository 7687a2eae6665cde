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

// config is what options set.
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
	replyTimeout    time.Duration // not an option: see New and Wrap
}

// The defaults are those of Redisson where it has the setting.
const (
	DefaultWatchdogTimeout = 30 * time.Second
	DefaultFairWaitTimeout = 5 * time.Minute
	DefaultHandOffLimit    = 16
)

// minWatchdogTimeout leaves room for a few tries to renew before a lease is
// over.
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

// WithWatchdogTimeout sets the lease of what is taken without one: it is
// renewed after a third of that time, and free again that long after its
// process died. The default is 30 s, the least 100 ms. It is what Redisson calls
// lockWatchdogTimeout; clients with different timeouts go together.
func WithWatchdogTimeout(d time.Duration) Option {
	return func(c *config) error {
		if d < minWatchdogTimeout || d > lock.MaxLease {
			return fmt.Errorf("%w: watchdog timeout %v: must be from %v to %v", lock.ErrInvalid, d, minWatchdogTimeout, lock.MaxLease)
		}
		c.watchdogTimeout = d
		return nil
	}
}

// WithFairWaitTimeout sets what a place in the queue of a fair lock adds to the
// deadlines that Java clients compute and go by. It should be what their
// fairLockWaitTimeout is; the default, 5 minutes, is Redisson's, the least a
// second. A waiter of redlatch that died loses its place much sooner, as far as
// redlatch is concerned: see package fairlock.
func WithFairWaitTimeout(d time.Duration) Option {
	return func(c *config) error {
		if d < time.Second {
			return fmt.Errorf("%w: fair wait timeout %v: must be a second or more", lock.ErrInvalid, d)
		}
		c.fairWait = d
		return nil
	}
}

// WithNameMapper sets how names become keys, for example to put a prefix
// before them all. Channels and helper keys are made of the mapped name. It is
// what Redisson calls nameMapper. f is called once for each object made, must
// be fast, and must give the same key for the same name in every process.
func WithNameMapper(f func(name string) string) Option {
	return func(c *config) error {
		if f == nil {
			return fmt.Errorf("%w: the name mapper is nil", lock.ErrInvalid)
		}
		c.mapName = f
		return nil
	}
}

// WithPubSubMode sets the kind of pub/sub, which all processes that share locks
// must agree on. The default, pubsub.Auto, decides as Redisson does. Sharded is
// an error of New on anything but a cluster.
func WithPubSubMode(m pubsub.Mode) Option {
	return func(c *config) error {
		if m > pubsub.Plain {
			return fmt.Errorf("%w: pub/sub mode %d", lock.ErrInvalid, m)
		}
		c.mode = m
		return nil
	}
}

// WithHandOffLimit sets how many times in a row a lock may be passed from one
// waiter of this process to the next before it is released for all. Passing on
// costs one round trip at most instead of three; the limit is what other processes
// wait for. The default is 16; 0 never passes on.
func WithHandOffLimit(n int) Option {
	return func(c *config) error {
		if n < 0 {
			return fmt.Errorf("%w: hand-off limit %d is negative", lock.ErrInvalid, n)
		}
		c.handOffs = n
		return nil
	}
}

// WithLogger sets where trouble is logged: renewals that fail, holds dropped
// without Unlock, connections lost. The default is slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(c *config) error {
		if l == nil {
			return fmt.Errorf("%w: the logger is nil; slog.New(slog.DiscardHandler) drops everything", lock.ErrInvalid)
		}
		c.logger = l
		return nil
	}
}

// WithTracerProvider sets where spans go. The default is OpenTelemetry's global
// provider, if one was set when the client was made.
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(c *config) error {
		c.tracers = p
		return nil
	}
}

// WithMeterProvider sets where metrics go. The default is OpenTelemetry's
// global provider, if one was set when the client was made.
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(c *config) error {
		c.meters = p
		return nil
	}
}

// WithMetricName puts the names of locks into metrics, as the attribute
// redlatch.name, where they are left out by default: each name is a time series
// of its own. f turns a name into what stands for it, for example the name
// without the number of an order; it must be fast, and "" leaves the name out.
// Metrics that are of no one lock go without.
func WithMetricName(f func(name string) string) Option {
	return func(c *config) error {
		if f == nil {
			return fmt.Errorf("%w: the function for names in metrics is nil", lock.ErrInvalid)
		}
		c.metricName = f
		return nil
	}
}

// WithoutStartupChecks leaves out what New, Open and Wrap ask every server
// before they return: whether it may evict locks, is too old, has a clock that
// is far off, or does not let this user take locks. They log what they find, as
// warnings, and never fail for it. It is for programs that live too briefly to
// spend a few round trips; Client.Probe does the same on demand.
func WithoutStartupChecks() Option {
	return func(c *config) error {
		c.startupChecks = false
		return nil
	}
}

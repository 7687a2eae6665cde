package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Client makes the locks of one process on one store. NewClient creates it. Its methods are safe for concurrent use.
//
// The waiters of a process wait on the store, each with a request of its own.
type Client struct {
	d      Driver
	store  string
	id     string
	err    error // of an option
	log    *slog.Logger
	tel    *telemetry.Telemetry
	wheel  *watchdog.Wheel
	owners atomic.Uint64

	nested  engine.Nested
	dropped session.Dropped

	ctx, stopCtx context.Context // they end with Close, and with Shutdown or Close
	cancel, stop context.CancelFunc
	closing      sync.Once
	work         sync.WaitGroup // what running counts

	// mu guards what follows, and the claims and holds. No method of the driver is called with it locked.
	mu      sync.Mutex
	closed  bool
	running int // calls that acquire or release, and releases in the background
	left    int // holds that Close has ended
	claims  map[*claim]struct{}
	owned   map[ownedKey]*claim
	waits   map[key]map[*call]struct{}
	lost    []*hold // of owners that the callers named, until Unlock returns the loss; the latest last
}

// key identifies what excludes each other on the store.
type key struct {
	name      string
	semaphore bool
}

// ownedKey identifies the claim of an owner that the callers named.
type ownedKey struct {
	key
	owner lock.Owner
}

// maxLost bounds the lost holds that a client remembers.
const maxLost = 1000

// Option configures a Client.
type Option func(*config) error

type config struct {
	log     *slog.Logger
	tracers trace.TracerProvider
	meters  metric.MeterProvider
}

// WithLogger sets the logger for problems, such as a hold that was dropped without Unlock. The default is
// slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(c *config) error {
		if l == nil {
			return errors.New("the logger is nil; slog.New(slog.DiscardHandler) drops everything")
		}
		c.log = l
		return nil
	}
}

// WithTracerProvider sets the provider for spans. The default is OpenTelemetry's global provider, if one is set when the
// client is created.
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(c *config) error { c.tracers = p; return nil }
}

// WithMeterProvider sets the provider for metrics. The default is OpenTelemetry's global provider, if one is set when
// the client is created.
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(c *config) error { c.meters = p; return nil }
}

// NewClient returns a client that makes its requests with d, and that closes d. It sends nothing. After an option that is
// invalid each call fails with an error that matches lock.ErrInvalid.
func NewClient(d Driver, opts ...Option) *Client {
	c := &Client{
		d: d, id: uuid.Must(uuid.NewV7()).String(), wheel: watchdog.NewWheel(nil),
		claims: make(map[*claim]struct{}), owned: make(map[ownedKey]*claim), waits: make(map[key]map[*call]struct{}),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.stopCtx, c.stop = context.WithCancel(c.ctx)

	cfg := config{log: slog.Default()}
	c.err = session.Configure(&cfg, opts)
	c.log = cfg.log
	if d == nil {
		c.err = cmp.Or(c.err, fmt.Errorf("%w: the driver is nil", lock.ErrInvalid))
		return c
	}

	c.store = d.Store()
	tel, err := telemetry.New(cfg.tracers, cfg.meters, nil)
	c.tel = tel
	if err != nil {
		c.err = cmp.Or(c.err, fmt.Errorf("%w: %w", lock.ErrInvalid, err))
	}
	return c
}

// ID returns the UUID with which all owners of this client begin.
func (c *Client) ID() string { return c.id }

// NewOwner returns an unused owner for lock.WithOwner. It sends nothing.
func (c *Client) NewOwner() lock.Owner {
	o, err := lock.NewOwner(c.id, c.owners.Add(1))
	if err != nil {
		panic("redlatch: the id of a client is not a UUID: " + err.Error())
	}
	return o
}

// Hold describes what a client holds, or a call that waits.
type Hold struct {
	// Kind is the kind of object, as in logs and telemetry: "etcd" or "etcd-semaphore", for example.
	Kind string
	// Name is the name that was passed to the client.
	Name string
	// Owner is the id under which the store has the claim, "" for a call that waits.
	Owner string
	// Waiting is set for a call that waits, or whose request has no answer yet.
	Waiting bool
	// Since is when Lock returned the hold, or when it was called.
	Since time.Time
	// Remaining is the result of the hold's Remaining. It is 0 for a call that waits.
	Remaining time.Duration
	// Site is the function and the line that called Lock, TryLock or Do, or what lock.Site names.
	Site string
}

// Holds returns what this client holds and waits for, the oldest first. It sends nothing and does not block. Calls of
// TryLock are not listed.
func (c *Client) Holds() []Hold {
	all, holds := c.list()
	for _, h := range holds {
		listed := h.Listed(session.Hold{Remaining: h.Remaining()})
		if listed.Site.IsZero() { // it has ended meanwhile
			continue
		}
		all = append(all, Hold{
			Kind: h.l.id.Kind, Name: h.l.id.Name, Owner: h.Owner().String(), Since: listed.Since, Remaining: listed.Remaining,
			Site: listed.Site.String(),
		})
	}

	slices.SortFunc(all, func(a, b Hold) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Owner, b.Owner))
	})
	return all
}

// list returns the calls that wait, and the holds.
func (c *Client) list() (waiting []Hold, holds []*hold) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, calls := range c.waits {
		for w := range calls {
			waiting = append(waiting, Hold{
				Kind: w.l.id.Kind, Name: w.l.id.Name, Waiting: true, Since: w.began, Site: w.site.String(),
			})
		}
	}
	for cl := range c.claims {
		holds = append(holds, cl.holds...)
	}

	return waiting, holds
}

// enter notes that work begins, for which Close and Shutdown wait until leave. It reports false if the client is closed.
func (c *Client) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.running++
		c.work.Add(1)
	}
	return !c.closed
}

func (c *Client) leave() {
	c.mu.Lock()
	c.running--
	c.mu.Unlock()
	c.work.Done()
}

// background runs f on its own goroutine. It reports false, and does not run f, if the client is closed.
func (c *Client) background(f func(context.Context)) bool {
	if !c.enter() {
		return false
	}
	go func() {
		defer c.leave()
		f(c.ctx)
	}()
	return true
}

// bound returns a context with the values of ctx that ends after UnlockTimeout, or when the client is closed.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), engine.UnlockTimeout)
	stop := context.AfterFunc(c.ctx, cancel)
	return bound, func() {
		stop()
		cancel()
	}
}

// until returns a context that ends with ctx, or when done does.
func until(ctx, done context.Context) (context.Context, context.CancelFunc) {
	both, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(done, cancel)
	return both, func() {
		stop()
		cancel()
	}
}

// Close ends all waits and holds with lock.ErrClosed, and closes the driver, which ends the claims on the store: others
// may have the locks when it returns, also those that lock.AtLeast has kept. Shutdown waits for the holds first. Close
// blocks for a few seconds at most. Repeated calls wait for the first one.
func (c *Client) Close() { c.closing.Do(c.close) }

func (c *Client) close() {
	c.stop()
	c.cancel()

	c.mu.Lock()
	c.closed = true
	var lost []*hold
	for cl := range c.claims {
		for _, h := range cl.holds {
			if h.awaited() {
				c.left++
			}
		}
		lost = append(lost, cl.loseLocked(lock.ReasonClosed, nil)...)
		cl.endLocked()
	}
	c.mu.Unlock()

	c.work.Wait()
	if c.d != nil {
		c.d.Close()
	}
	c.wheel.Stop()
	c.dropped.Flush(c.log)
	for _, h := range lost { // last: an exporter may panic
		h.EndSpan(c.background)
	}
}

// Shutdown closes the client when all holds are unlocked. From its call on, acquisitions fail with lock.ErrClosed, and
// waits end with it; an owner (see lock.WithOwner) can still re-enter what it holds. Shutdown blocks until the holds have
// ended and their releases have returned, closes the client like Close, and returns nil. If ctx ends first it closes the
// client at once; the error then matches context.Cause(ctx), and contains the number of holds that are lost with
// lock.ReasonClosed. It matches lock.ErrClosed if Close has ended holds meanwhile. If ctx is nil, the error matches
// lock.ErrInvalid, and nothing happens. Holds that were dropped without Unlock, and locks that lock.AtLeast keeps, are not waited for.
func (c *Client) Shutdown(ctx context.Context) error {
	client := wire.Object{Kind: "client"}
	if err := session.CheckContext(ctx); err != nil {
		return client.Refused("shut down", err)
	}
	if c.ctx.Err() != nil {
		c.Close()  // it may be under way
		return nil //nolint:nilerr // the client is closed, as it should be
	}

	c.stop()
	began := time.Now()
	err := c.drain(ctx)
	c.Close()
	if err == nil && c.left > 0 {
		err = lock.ErrClosed
	}
	if err == nil {
		return nil
	}

	err = fmt.Errorf("redlatch: closed before everything was released (holds left: %d): %w", c.left, err)
	return &lock.Error{Op: "shut down", Kind: client.Kind, Waited: time.Since(began), Err: err}
}

// maxDrainPause bounds the pause between two looks at what the client still holds.
const maxDrainPause = 20 * time.Millisecond

// drain waits until the client is idle or closed. If ctx ends first it returns the cause.
func (c *Client) drain(ctx context.Context) error {
	for pause := time.Millisecond; !c.idle(); pause = min(2*pause, maxDrainPause) {
		select {
		case <-time.After(pause):
		case <-c.ctx.Done():
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// idle reports whether a client that is stopping has nothing left to do.
func (c *Client) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.running > 0 {
		return false
	}
	for cl := range c.claims {
		if slices.ContainsFunc(cl.holds, (*hold).awaited) {
			return false
		}
	}
	return true
}

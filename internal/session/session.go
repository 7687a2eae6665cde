// Package session holds the state shared by the objects of one client: the connection,
// the hub, the watchdog, the pending cleanups, and the client's identity.
package session

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Config configures a session. Every field is required unless noted.
type Config struct {
	Client          rueidis.Client
	ID              string
	WatchdogTimeout time.Duration
	FairWait        time.Duration
	Turn            time.Duration // see engine.Config
	MapName         func(string) string
	StrictNames     bool // wire.CheckStrictly applies
	Sharded         bool
	// ReplyTimeout bounds requests on a connection whose own timeouts are too long; 0
	// means no bound.
	ReplyTimeout time.Duration
	// Conns are the connections of Client, nil if it is borrowed.
	Conns *wire.Conns
	// Ordered is set if the server runs requests for one key in the order in which they are
	// sent.
	Ordered   bool
	Logger    *slog.Logger
	Telemetry *telemetry.Telemetry // nil: off
}

// Session is the shared state of a client's objects. Its fields do not change after
// New.
type Session struct {
	Config
	client *wire.Client // the Client
	// Publish is the command that publishes releases.
	Publish string
	// PartialCounts is set if the reply of Publish omits the subscribers of other
	// cluster nodes.
	PartialCounts bool
	Watchdog      *watchdog.Watchdog
	Hub           *hub.Hub
	Warnings      Warnings

	owners        atomic.Uint64
	identity      atomic.Pointer[identity]
	serverAwaited atomic.Bool // see AwaitServer
	process       process
	warned        atomic.Int64 // when a failed renewal was last logged, in Unix nanoseconds
	dropped       Dropped

	mu      sync.Mutex
	closed  bool
	closing atomic.Bool     // Close was called
	ended   chan struct{}   // closed when Close has done its work
	left    int             // holds that were lost because the session was closed
	stopCtx context.Context // of acquisitions and waits; a child of ctx
	stop    context.CancelFunc
	joined  atomic.Int64    // number of users of Join
	ctx     context.Context // for background tasks
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
	running atomic.Int64 // number of tasks

	holds    []func() iter.Seq[Hold]            // see List
	counted  []func() (waiting, attempting int) // see Count
	cleanups cleanups
	shutBy   atomic.Pointer[time.Time] // when requests have to end, set by a Shutdown that was not in time

	watchdogMillis string // WatchdogTimeout, formatted

	// callers is read-locked during acquisitions, so that Close can let them clean up
	// before the connection is closed.
	callers sync.RWMutex
}

// New returns a running session.
func New(cfg Config) *Session {
	s := &Session{Config: cfg, Publish: "PUBLISH", watchdogMillis: wire.Millis(cfg.WatchdogTimeout)}
	s.client = wire.NewClient(cfg.Client, cfg.Conns, cfg.ReplyTimeout)
	s.Client = s.client
	s.cleanups.wake = make(chan struct{}, 1)
	s.ended = make(chan struct{})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.stopCtx, s.stop = context.WithCancel(s.ctx)
	watch := watchdog.Config{OnRenew: s.renewed}
	if s.Cluster() {
		watch.Slot = wire.Slot
	}
	if cfg.Sharded {
		s.Publish = "SPUBLISH"
	}
	s.PartialCounts = s.Cluster() && !cfg.Sharded
	s.Watchdog = watchdog.New(watch)
	s.Hub = hub.New(cfg.Client, hub.Options{
		Sharded: cfg.Sharded, Logger: cfg.Logger, OnReconnect: cfg.Telemetry.Reconnect,
	})
	return s
}

// Contended notes that a caller begins to wait for another.
func (s *Session) Contended() {
	if s.Conns != nil && !s.Conns.Contended.Load() {
		s.Conns.Contended.Store(true)
	}
}

// Subscribe subscribes l through the hub. The caller ends the subscription with unsubscribe.
func (s *Session) Subscribe(channel string, l hub.Listener) (unsubscribe func(), confirmed bool) {
	sub, confirmed := s.Hub.Subscribe(channel, l)
	return sub.Close, confirmed
}

// SubscribeOwn is Subscribe for a channel that belongs to one listener, and is not used again.
func (s *Session) SubscribeOwn(channel string, l hub.Listener) (unsubscribe func()) {
	sub, _ := s.Hub.Subscribe(channel, l)
	return sub.Discard
}

// List makes holds a part of Holds. It is called before the session is used.
func (s *Session) List(holds func() iter.Seq[Hold]) { s.holds = append(s.holds, holds) }

// Count makes callers a part of Callers. It is called before the session is used.
func (s *Session) Count(callers func() (waiting, attempting int)) {
	s.counted = append(s.counted, callers)
}

// Callers returns the number of callers that wait, and of those that make an attempt.
func (s *Session) Callers() (waiting, attempting int) {
	for _, callers := range s.counted {
		w, a := callers()
		waiting += w
		attempting += a
	}
	return waiting, attempting
}

// Cluster reports whether the server is a cluster.
func (s *Session) Cluster() bool { return s.Client.Mode() == rueidis.ClientModeCluster }

func (s *Session) renewed(remaining time.Duration, err error) {
	s.Telemetry.Renewal(remaining, err)
	if err == nil {
		return
	}

	now := time.Now().UnixNano()
	if last := s.warned.Load(); now-last >= int64(time.Second) && s.warned.CompareAndSwap(last, now) {
		// An outage fails many renewals at once.
		s.Logger.Warn("redlatch: renewal failed; will retry", "remaining", remaining, "error", err)
	}
}

// NewOwner returns an owner that no other acquisition uses.
func (s *Session) NewOwner() lock.Owner {
	o, err := lock.NewOwner(s.ID, s.owners.Add(1))
	if err != nil {
		panic("redlatch: the id of a session is not a UUID: " + err.Error())
	}
	return o
}

// Millis is wire.Millis with a cached result for the watchdog timeout.
func (s *Session) Millis(d time.Duration) string {
	if d == s.WatchdogTimeout {
		return s.watchdogMillis
	}
	return wire.Millis(d)
}

// Key returns the key of an object, or an error if check rejects its name or key.
func (s *Session) Key(name string, check func(string) error) (string, error) {
	if err := check(name); err != nil {
		return "", err
	}

	key := s.MapName(name)
	if err := check(key); err != nil {
		return "", fmt.Errorf("name mapped to %q: %w", key, err)
	}
	if s.StrictNames {
		if err := wire.CheckStrictly(key); err != nil {
			return "", err
		}
	}
	return key, nil
}

// CheckName is wire.CheckName for the server of this session.
func (s *Session) CheckName(name string) error { return wire.CheckName(name, s.Cluster()) }

// CheckLatchName is wire.CheckLatchName for the server of this session.
func (s *Session) CheckLatchName(name string) error {
	return wire.CheckLatchName(name, s.Cluster(), s.Sharded)
}

// CheckLease returns an error that matches lock.ErrInvalid unless d is a lease the server
// can keep: from a millisecond to lock.MaxLease.
func CheckLease(d time.Duration) error {
	if d < time.Millisecond || d > lock.MaxLease {
		return fmt.Errorf("%w: lease %v: must be from a millisecond to %v", lock.ErrInvalid, d, lock.MaxLease)
	}
	return nil
}

// CheckContext returns an error if ctx is nil.
func CheckContext(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	return nil
}

// Check returns an error if ctx is nil or the session is closed.
func (s *Session) Check(ctx context.Context) error {
	if err := CheckContext(ctx); err != nil {
		return err
	}
	return s.Err()
}

// Err returns lock.ErrClosed if the session is closed.
func (s *Session) Err() error {
	if s.ctx.Err() != nil {
		return lock.ErrClosed
	}
	return nil
}

// Done returns a channel that is closed when the session is.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// Enter must be called before an acquisition. It reports whether the session is open, and does not
// shut down; if so, Leave must be called afterwards.
func (s *Session) Enter() bool { return s.enter(s.Stopped) }

// Stay is Enter for a release, or for an acquisition by an owner that may hold the lock already. It
// also succeeds while the session shuts down.
func (s *Session) Stay() bool { return s.enter(s.Err) }

func (s *Session) enter(err func() error) bool {
	s.callers.RLock()
	if err() != nil {
		s.callers.RUnlock()
		return false
	}
	return true
}

// Leave ends what Enter or Stay began.
func (s *Session) Leave() { s.callers.RUnlock() }

// Go runs f in the background with a context that ends when the session closes. It
// reports false, and does not run f, if the session is closed.
func (s *Session) Go(f func(ctx context.Context)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Add(1)
		s.tasks.Add(1)
		go s.run(f)
	}
	return !s.closed
}

// run runs a function of Go.
func (s *Session) run(f func(ctx context.Context)) {
	defer s.tasks.Done()
	defer s.running.Add(-1)
	f(s.ctx)
}

// Running returns the number of functions passed to Go that have not returned.
func (s *Session) Running() int { return int(s.running.Load()) }

// Join registers an acquisition from several sessions: Close and Shutdown wait for leave, and
// onClose is called when one of them begins. It reports false, with a nil leave, if one has begun.
func (s *Session) Join(onClose func()) (leave func(), open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.closed || s.Stopped() != nil {
		return nil, false
	}

	s.tasks.Add(1)
	s.joined.Add(1)
	stop := context.AfterFunc(s.stopCtx, onClose)
	return func() {
		stop()
		s.joined.Add(-1)
		s.tasks.Done()
	}, true
}

// OnClose calls f on its own goroutine when the session begins to close, unless stop is
// called first.
func (s *Session) OnClose(f func()) (stop func() bool) { return context.AfterFunc(s.ctx, f) }

// Close ends all waits and holds with lock.ErrClosed and waits for the session's
// goroutines. It leaves the keys of the holds to expire: the work under them may not
// have noticed yet. It does not close the connection. A concurrent call waits for the first one.
func (s *Session) Close() {
	if s.closing.Swap(true) {
		<-s.ended
		return
	}
	defer close(s.ended)

	s.left = s.countHolds()
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop() // first: a closed session is Stopped
	s.cancel()

	// Waiters leave at once, attempts in flight when they have their reply.
	s.callers.Lock()
	//lint:ignore SA2001 this only waits for the callers
	s.callers.Unlock()
	s.Watchdog.Close()
	s.Hub.Close()
	s.tasks.Wait()
	s.dropped.Flush(s.Logger)
}

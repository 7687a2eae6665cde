// Package session is what the objects of one client share: the connection, the
// hub, the watchdog, the queues, and the identity their owners are made of.
package session

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// Config is what a session is made of. Every field is set.
type Config struct {
	Client          rueidis.Client
	ID              string
	WatchdogTimeout time.Duration
	FairWait        time.Duration
	HandOffs        int
	MapName         func(string) string
	Sharded         bool
	// ReplyTimeout bounds requests that must not wait for longer than the
	// connection allows by itself; 0 where that is short enough.
	ReplyTimeout time.Duration
	Logger       *slog.Logger
	Telemetry    *telemetry.Telemetry // nil: off
}

// Session is the shared state of a client's objects. Its fields are not
// changed after New.
type Session struct {
	Config
	// Publish is the command that tells other processes of a release.
	Publish string
	// PartialCounts is set where its reply does not count all subscribers: not those
	// of other nodes of a cluster.
	PartialCounts bool
	Dog           *watchdog.Dog
	Hub           *pubsub.Hub
	Queues        *queue.Queues

	owners   atomic.Uint64
	identity atomic.Pointer[identity]

	mu      sync.Mutex
	closed  bool
	ctx     context.Context // of what runs in the background
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
	running atomic.Int64 // how many of the tasks
	warned  time.Time    // when a failed renewal was logged last

	shared sync.Map // by type: see Of

	watchdogMillis string // the watchdog timeout

	// callers is held for reading by whoever is acquiring something, so that
	// Close can let them clean up before the connection goes.
	callers sync.RWMutex
}

// New returns a running session.
func New(cfg Config) *Session {
	s := &Session{Config: cfg, Publish: "PUBLISH", watchdogMillis: wire.Millis(cfg.WatchdogTimeout)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	dog := watchdog.Config{OnRenew: s.renewed}
	if s.Cluster() {
		dog.Slot = wire.Slot
	}
	if cfg.Sharded {
		s.Publish = "SPUBLISH"
	}
	s.PartialCounts = s.Cluster() && !cfg.Sharded
	s.Dog = watchdog.NewDog(dog)
	s.Hub = pubsub.New(cfg.Client, pubsub.Options{
		Sharded: cfg.Sharded, Logger: cfg.Logger, OnReconnect: cfg.Telemetry.Reconnect,
	})
	s.Queues = queue.New(queue.Config{
		Wheel: s.Dog.Wheel(), Subscribe: s.subscribe, HandOffs: cfg.HandOffs,
		Patience: cfg.WatchdogTimeout, Go: s.Go,
	})
	return s
}

func (s *Session) subscribe(channel string, l pubsub.Listener, own bool) (func(), bool) {
	sub, confirmed := s.Hub.Subscribe(channel, l)
	if own {
		return sub.Discard, confirmed
	}
	return sub.Close, confirmed
}

// Of returns the T of the session, which begins as its zero value: what a package
// keeps for all objects of one client.
func Of[T any](s *Session) *T {
	key := reflect.TypeFor[T]()
	if t, ok := s.shared.Load(key); ok {
		return t.(*T)
	}
	t, _ := s.shared.LoadOrStore(key, new(T))
	return t.(*T)
}

// Cluster reports whether the server is a cluster.
func (s *Session) Cluster() bool { return s.Client.Mode() == rueidis.ClientModeCluster }

func (s *Session) renewed(remaining time.Duration, err error) {
	s.Telemetry.Renewal(remaining, err)
	if err == nil {
		return
	}
	s.mu.Lock()
	quiet := time.Since(s.warned) < time.Second // an outage fails many at once
	if !quiet {
		s.warned = time.Now()
	}
	s.mu.Unlock()
	if !quiet {
		s.Logger.Warn("redlatch: renewal failed, will try again", "remaining", remaining, "error", err)
	}
}

// NewOwner returns an owner that no other acquisition has.
func (s *Session) NewOwner() lock.Owner {
	o, err := lock.NewOwner(s.ID, s.owners.Add(1))
	if err != nil {
		panic("redlatch: the id of a session is not a UUID: " + err.Error())
	}
	return o
}

// Millis is wire.Millis, which for the lease of most holds is known already.
func (s *Session) Millis(d time.Duration) string {
	if d == s.WatchdogTimeout {
		return s.watchdogMillis
	}
	return wire.Millis(d)
}

// Key returns the key of an object of that name, or why there can be none: check says
// so of names and keys.
func (s *Session) Key(name string, check func(string) error) (string, error) {
	if err := check(name); err != nil {
		return "", err
	}
	key := s.MapName(name)
	if key == name {
		return key, nil
	}
	if err := check(key); err != nil {
		return "", fmt.Errorf("name mapped to %q: %w", key, err)
	}
	return key, nil
}

// Bounded returns the context for one request that must not wait for much longer than
// the connection allows by itself, whatever that does.
func (s *Session) Bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.ReplyTimeout > 0 {
		return context.WithTimeout(ctx, s.ReplyTimeout)
	}
	return ctx, func() {}
}

// Check returns why no request can be made under ctx, or nil: there is none, or the
// session is closed.
func (s *Session) Check(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	return s.Err()
}

// Err returns lock.ErrClosed once the session is closed.
func (s *Session) Err() error {
	if s.ctx.Err() != nil {
		return lock.ErrClosed
	}
	return nil
}

// Done is closed when the session is.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// Enter is called before an acquisition and reports whether the session is
// open; Leave is called after it then.
func (s *Session) Enter() bool {
	s.callers.RLock()
	if s.Err() != nil {
		s.callers.RUnlock()
		return false
	}
	return true
}

// Leave ends what Enter began.
func (s *Session) Leave() { s.callers.RUnlock() }

// Go runs f in the background with a context that ends when the session
// closes, and reports whether it does: on a closed session f does not run.
func (s *Session) Go(f func(ctx context.Context)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Add(1)
		s.tasks.Go(func() {
			defer s.running.Add(-1)
			f(s.ctx)
		})
	}
	return !s.closed
}

// Running returns how many functions that were given to Go have not returned.
func (s *Session) Running() int { return int(s.running.Load()) }

// Join is for what uses the objects of several sessions: this one is not closed
// altogether before leave is called, and onClose is called when it begins to be. It reports
// false if it has begun; leave is nil then.
func (s *Session) Join(onClose func()) (leave func(), open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, false
	}
	s.tasks.Add(1)
	stop := context.AfterFunc(s.ctx, onClose)
	return func() {
		stop()
		s.tasks.Done()
	}, true
}

// OnClose calls f, on a goroutine of its own, when the session begins to be closed, unless
// stop is called before.
func (s *Session) OnClose(f func()) (stop func() bool) { return context.AfterFunc(s.ctx, f) }

// Close ends every wait and every hold with lock.ErrClosed and waits for the
// session's goroutines. The keys of its holds are left to their leases: the
// work under them may not have noticed yet. It does not close the connection.
func (s *Session) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.Queues.Close()
	// Waiters leave at once, attempts under way when they have their answer.
	s.callers.Lock()
	//lint:ignore SA2001 it is the waiting that counts
	s.callers.Unlock()
	s.Dog.Close()
	s.Hub.Close()
	s.tasks.Wait()
}

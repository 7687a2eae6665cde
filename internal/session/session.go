// Package session is what the objects of one client share: the connection, the
// hub, the watchdog, the queues, and the identity their owners are made of.
package session

import (
	"context"
	"log/slog"
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
	Logger          *slog.Logger
	Telemetry       *telemetry.Telemetry // nil: off
}

// Session is the shared state of a client's objects. Its fields are not
// changed after New.
type Session struct {
	Config
	// Publish is the command that tells other processes of a release.
	Publish string
	Dog     *watchdog.Dog
	Hub     *pubsub.Hub
	Queues  *queue.Queues

	owners atomic.Uint64

	mu     sync.Mutex
	held   map[HeldKey][]Unlocker
	closed bool
	ctx    context.Context // of what runs in the background
	cancel context.CancelFunc
	tasks  sync.WaitGroup
}

// HeldKey names what an owner holds.
type HeldKey struct {
	Kind, Key string
	Owner     lock.Owner
}

// Unlocker is a hold, as another part of the process can end it.
type Unlocker interface {
	Unlock(ctx context.Context) error
}

// New returns a running session.
func New(cfg Config) *Session {
	s := &Session{Config: cfg, Publish: "PUBLISH", held: make(map[HeldKey][]Unlocker)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	dog := watchdog.Config{Timeout: cfg.WatchdogTimeout, OnRenew: s.renewed}
	if s.Cluster() {
		dog.Slot = wire.Slot
	}
	if cfg.Sharded {
		s.Publish = "SPUBLISH"
	}
	s.Dog = watchdog.NewDog(dog)
	s.Hub = pubsub.New(cfg.Client, pubsub.Options{
		Sharded: cfg.Sharded, Logger: cfg.Logger, OnReconnect: cfg.Telemetry.Reconnect,
	})
	s.Queues = queue.New(queue.Config{
		Wheel: s.Dog.Wheel(), Subscribe: s.subscribe, HandOffs: cfg.HandOffs,
		Patience: cfg.WatchdogTimeout, OnPoll: cfg.Telemetry.Poll,
	})
	return s
}

func (s *Session) subscribe(channel string, l pubsub.Listener) (func(), bool) {
	sub, confirmed := s.Hub.Subscribe(channel, l)
	return sub.Close, confirmed
}

// Cluster reports whether the server is a cluster.
func (s *Session) Cluster() bool { return s.Client.Mode() == rueidis.ClientModeCluster }

func (s *Session) renewed(remaining time.Duration, err error) {
	if err != nil {
		s.Logger.Warn("redlatch: renewal failed, will try again", "remaining", remaining, "error", err)
	}
	s.Telemetry.Renewal(remaining, err)
}

// NewOwner returns an owner that no other acquisition has.
func (s *Session) NewOwner() lock.Owner {
	o, err := lock.NewOwner(s.ID, s.owners.Add(1))
	if err != nil {
		panic("redlatch: the id of a session is not a UUID: " + err.Error())
	}
	return o
}

// Err returns lock.ErrClosed once the session is closed.
func (s *Session) Err() error {
	if s.ctx.Err() != nil {
		return lock.ErrClosed
	}
	return nil
}

// Go runs f in the background with a context that ends when the session
// closes. On a closed session f does not run.
func (s *Session) Go(f func(ctx context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.tasks.Go(func() { f(s.ctx) })
	}
}

// Remember notes that a named owner has one more hold in this process.
func (s *Session) Remember(k HeldKey, h Unlocker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[k] = append(s.held[k], h)
}

// Latest returns the hold that the owner took last in this process, or nil.
func (s *Session) Latest(k HeldKey) Unlocker {
	s.mu.Lock()
	defer s.mu.Unlock()
	if holds := s.held[k]; len(holds) > 0 {
		return holds[len(holds)-1]
	}
	return nil
}

// Drop forgets what Remember noted, if it did.
func (s *Session) Drop(k HeldKey, h Unlocker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	holds := s.held[k]
	for i, other := range holds {
		if other == h {
			holds = append(holds[:i], holds[i+1:]...)
			break
		}
	}
	if len(holds) == 0 {
		delete(s.held, k)
	} else {
		s.held[k] = holds
	}
}

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
	s.Dog.Close()
	s.Hub.Close()
	s.tasks.Wait()
}

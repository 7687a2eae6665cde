package etcdlock

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// store is the driver.Driver.
type store struct {
	c       *clientv3.Client
	prefix  string
	ttl     time.Duration // of the lease that claims share
	timeout time.Duration // of the first attempt of a request

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	wake    chan struct{} // see rouse
	work    sync.WaitGroup
	streams atomic.Int64 // see watching

	// mu guards what follows, and the fields of leases and claims that say so. No request is made with it locked.
	mu      sync.Mutex
	closed  bool
	session *lease // that new claims get, or nil
	opening bool   // session is being requested
	opens   time.Time
	pause   time.Duration
	failed  error         // of the last request for a session
	changed chan struct{} // closed when session or failed changes
	leases  map[*lease]struct{}
	owners  map[lock.Owner]*claim
}

var _ driver.Driver = (*store)(nil)

func newStore(c *clientv3.Client, cfg config) *store {
	s := &store{
		c: c, prefix: cfg.prefix, ttl: cfg.ttl, timeout: min(max(cfg.ttl/5, minTimeout), firstTimeout), wake: make(chan struct{}, 1),
		pause: minPause, changed: make(chan struct{}), leases: make(map[*lease]struct{}), owners: make(map[lock.Owner]*claim),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Store implements driver.Driver.
func (s *store) Store() string { return "etcd" }

// maxName is the length in bytes of the longest name. Its key is at most three times as long, which is far less than
// the longest request.
const maxName = 4096

// CheckName implements driver.Driver.
func (s *store) CheckName(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("%w: the name has %d bytes, more than %d", lock.ErrInvalid, len(name), maxName)
	}
	return nil
}

// stem returns what the keys of a name begin with, and no others: of a stem, only the prefix contains a slash, at its end, and
// only the last byte is a comma.
func (s *store) stem(name string) string { return s.prefix + url.PathEscape(name) + "," }

// goLocked runs f in the background, unless the store is closed.
func (s *store) goLocked(f func()) {
	if !s.closed {
		s.work.Go(f)
	}
}

// closeTimeout bounds the last requests of Close.
const closeTimeout = 2 * time.Second

// Close implements driver.Driver. It revokes all leases, so that all keys go.
func (s *store) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.work.Wait()

	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	var last sync.WaitGroup
	s.mu.Lock()
	for l := range s.leases {
		last.Go(func() { _, _ = ask(ctx, s, true, closeTimeout, 2, s.revoke(l)) }) // there is no time for another attempt
	}
	s.mu.Unlock()
	last.Wait()
}

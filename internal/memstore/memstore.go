// Package memstore is a store in memory and its driver, for tests of locks on stores other than Redis, also in
// virtual time.
package memstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Store is a store in memory: it has sessions, which end without heartbeats, and a line of claims and waiters for each
// name.
type Store struct {
	TTL     time.Duration // of a session
	Leases  bool          // it ends claims with a lease by itself
	Latency time.Duration // of a message
	Lossy   int           // one reply of so many is lost; 0: none
	Refuses error         // what it says to requests for a claim, or nil

	mu      sync.Mutex
	lines   map[line][]*place
	tokens  int64
	replies int
}

type line struct {
	name      string
	semaphore bool
}

// place is a claim, or a place among those that wait.
type place struct {
	id      lock.Owner
	of      *remote
	shared  bool
	permits int
	granted bool
	token   int64
	changed chan struct{} // closed when it is granted, or has left
	ends    time.Time     // of a lease, or zero
	timer   *time.Timer   // the same, or nil
}

// remote is a session.
type remote struct {
	over  *time.Timer
	ended bool
}

var errGone = errors.New("memory: the session is over")

// New returns a store whose sessions end after three seconds without a heartbeat.
func New() *Store { return &Store{TTL: 3 * time.Second, lines: make(map[line][]*place)} }

// grantLocked grants what can be granted, in order.
func (s *Store) grantLocked(l line) {
	shared, exclusive := 0, 0
	for _, p := range s.lines[l] {
		if p.granted && p.shared {
			shared++
		} else if p.granted {
			exclusive++
		}
	}
	for _, p := range s.lines[l] {
		if p.granted {
			continue
		}
		if p.permits > 0 && exclusive >= p.permits || p.permits == 0 && exclusive > 0 || p.permits == 0 && !p.shared && shared > 0 {
			return
		}
		s.tokens++
		p.granted = true
		p.token = s.tokens
		close(p.changed)
		if p.shared {
			shared++
		} else {
			exclusive++
		}
	}
}

// join returns the place of a request, or nil if that does not wait and would have to.
func (s *Store) join(l line, of *remote, r driver.Request) (*place, error) {
	if of.ended {
		return nil, errGone
	}
	if s.Refuses != nil {
		return nil, s.Refuses
	}
	if i := slices.IndexFunc(s.lines[l], func(p *place) bool { return p.id == r.Owner }); i >= 0 {
		if p := s.lines[l][i]; p.of == of {
			return p, nil // an earlier reply was lost
		}
		s.leave(l, r.Owner)
	}

	p := &place{id: r.Owner, of: of, shared: r.Shared, permits: r.Permits, changed: make(chan struct{})}
	s.lines[l] = append(s.lines[l], p)
	s.grantLocked(l)
	if !p.granted && r.Try {
		s.leave(l, r.Owner)
		return nil, nil
	}
	return p, nil
}

// lease has a claim end after d, unless it ends later already.
func (s *Store) lease(l line, p *place, d time.Duration) {
	if ends := time.Now().Add(d); ends.After(p.ends) {
		p.ends = ends
	}
	if p.timer == nil {
		p.timer = time.AfterFunc(d, func() { _ = s.do(func() error { s.leave(l, p.id); return nil }) })
	}
	p.timer.Reset(time.Until(p.ends))
}

// leave removes a place, and reports whether it was there.
func (s *Store) leave(l line, id lock.Owner) bool {
	i := slices.IndexFunc(s.lines[l], func(p *place) bool { return p.id == id })
	if i < 0 {
		return false
	}
	p := s.lines[l][i]
	if !p.granted {
		close(p.changed)
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	s.lines[l] = slices.Delete(s.lines[l], i, i+1)
	s.grantLocked(l)
	return true
}

// end ends a session.
func (s *Store) end(of *remote) {
	of.ended = true
	of.over.Stop()
	for l, all := range s.lines {
		for _, p := range slices.Clone(all) {
			if p.of == of {
				s.leave(l, p.id)
			}
		}
	}
}

func (s *Store) do(f func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return f()
}

// Left returns what is stored for a name.
func (s *Store) Left(name string) (left []string) {
	_ = s.do(func() error {
		for _, semaphore := range []bool{false, true} {
			for _, p := range s.lines[line{name, semaphore}] {
				left = append(left, fmt.Sprintf("%v granted=%v", p.id, p.granted))
			}
		}
		return nil
	})
	return left
}

// Open removes all claims of a name.
func (s *Store) Open(name string) {
	_ = s.do(func() error {
		for _, semaphore := range []bool{false, true} {
			l := line{name, semaphore}
			for _, p := range slices.Clone(s.lines[l]) {
				s.leave(l, p.id)
			}
		}
		return nil
	})
}

// losesReply reports whether the next reply is lost.
func (s *Store) losesReply() (lost bool) {
	_ = s.do(func() error {
		s.replies++
		lost = s.Lossy > 0 && s.replies%s.Lossy == 0
		return nil
	})
	return lost
}

// Driver is the driver of a client for a store.
type Driver struct {
	s      *Store
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu      sync.Mutex
	session *session
	passes  chan struct{} // closed unless it is cut off
}

// session is what the driver knows of its session.
type session struct {
	remote *remote
	until  time.Time
	claims map[*claim]struct{}
	over   chan struct{} // closed when it is
}

// Driver returns another driver for the store.
func (s *Store) Driver() *Driver {
	m := &Driver{s: s, passes: make(chan struct{})}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	close(m.passes)
	return m
}

// Cut cuts the driver off from the store until restore is called.
func (m *Driver) Cut() (restore func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	passes := make(chan struct{})
	m.passes = passes
	return sync.OnceFunc(func() { close(passes) })
}

func (m *Driver) connected() chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.passes
}

// timeout bounds a request, and margin is how much earlier than the store the driver ends a session or a lease.
const (
	timeout = 500 * time.Millisecond
	margin  = time.Millisecond
)

// request has the store do something.
func (m *Driver) request(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case <-m.connected():
	case <-ctx.Done():
		return fmt.Errorf("%w: memory: not sent", lock.ErrUnavailable)
	}
	if ctx.Err() != nil || !sleep(ctx, m.s.Latency) {
		return fmt.Errorf("%w: memory: not sent", lock.ErrUnavailable)
	}

	err := m.s.do(f)
	if m.s.losesReply() {
		<-ctx.Done()
	}
	if !sleep(ctx, m.s.Latency) || ctx.Err() != nil {
		return fmt.Errorf("%w: memory: no reply", lock.ErrIndeterminate)
	}
	select {
	case <-m.connected():
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: memory: no reply", lock.ErrIndeterminate)
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// Store implements driver.Driver.
func (m *Driver) Store() string { return "memory" }

// CheckName implements driver.Driver.
func (m *Driver) CheckName(name string) error {
	if len(name) > 1000 {
		return fmt.Errorf("%w: the name is too long", lock.ErrInvalid)
	}
	return nil
}

// open returns the session, or a new one.
func (m *Driver) open(ctx context.Context) (*session, error) {
	m.mu.Lock()
	s := m.session
	m.mu.Unlock()
	if s != nil && time.Now().Before(s.certain(m)) {
		return s, nil
	}
	if s != nil {
		m.lose(s, lock.ReasonExpired)
	}

	s = &session{remote: new(remote), claims: make(map[*claim]struct{}), over: make(chan struct{})}
	sent := time.Now()
	err := m.request(ctx, func() error {
		s.remote.over = time.AfterFunc(m.s.TTL, func() { _ = m.s.do(func() error { m.s.end(s.remote); return nil }) })
		return nil
	})
	if err != nil { // the store ends it
		return nil, err
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	if m.session != nil && m.session != s && time.Now().Before(m.session.until) {
		return m.session, nil // another call was faster
	}
	s.until = sent.Add(m.s.TTL - margin)
	m.session = s
	m.tasks.Go(func() { m.keep(s) })
	return s, nil
}

func (s *session) certain(m *Driver) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return s.until
}

// keep sends heartbeats until the session is over.
func (m *Driver) keep(s *session) {
	for {
		until := s.certain(m)
		if !sleep(m.ctx, min(m.s.TTL/3, time.Until(until))) {
			return
		}
		if !time.Now().Before(until) {
			m.lose(s, lock.ReasonExpired)
			return
		}
		sent := time.Now()
		err := m.request(m.ctx, func() error {
			if s.remote.ended {
				return errGone
			}
			s.remote.over.Reset(m.s.TTL)
			return nil
		})
		if err == nil {
			m.mu.Lock()
			s.until = sent.Add(m.s.TTL - margin)
			m.mu.Unlock()
		} else if errors.Is(err, errGone) {
			m.lose(s, lock.ReasonGone)
			return
		}
	}
}

// lose ends a session and its claims.
func (m *Driver) lose(s *session, reason lock.Reason) {
	m.mu.Lock()
	if m.session != s {
		m.mu.Unlock()
		return
	}
	m.session = nil
	claims := s.claims
	s.claims = make(map[*claim]struct{})
	s.until = time.Time{}
	close(s.over)
	m.mu.Unlock()
	for c := range claims {
		c.r.Lost(reason, nil)
	}
}

// claim is what the store has granted.
type claim struct {
	m     *Driver
	s     *session
	r     driver.Request
	l     line
	token int64
	ends  time.Time // with its lease, or zero; the mutex of m guards it
}

// Acquire implements driver.Driver.
func (m *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Claim, error) {
	l := line{r.Name, r.Permits > 0}
	for {
		s, err := m.open(ctx)
		var p *place
		if err == nil {
			err = m.request(ctx, func() (err error) { p, err = m.s.join(l, s.remote, r); return err })
		}
		if errors.Is(err, errGone) {
			m.lose(s, lock.ReasonGone)
			continue
		}
		refused := err != nil && !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrIndeterminate)
		if err != nil && (r.FailFast || refused || ctx.Err() != nil) {
			m.background(func() { _ = m.remove(m.ctx, l, r.Owner) })
			return nil, err
		}
		if err != nil {
			continue
		}
		if p == nil {
			return nil, lock.ErrNotAcquired
		}

		c := &claim{m: m, s: s, r: r, l: l}
		is, err := m.await(ctx, s, p, c)
		if err != nil {
			m.background(func() { _ = m.remove(m.ctx, l, r.Owner) })
			return nil, err
		}
		if is {
			return c, nil
		}
	}
}

// await waits for the place to be granted, and reports false if the session ends before. A lease begins with a request,
// since nobody knows when the store has granted it.
func (m *Driver) await(ctx context.Context, s *session, p *place, c *claim) (is bool, err error) {
	select {
	case <-p.changed:
	case <-s.over:
		return false, nil
	case <-ctx.Done():
		return false, lock.ErrNotAcquired
	}
	select { // the message
	case <-m.connected():
	case <-s.over:
		return false, nil
	case <-ctx.Done():
		return false, lock.ErrUnavailable
	}

	sent := time.Now()
	if c.r.Lease > 0 && m.s.Leases {
		if err := m.request(ctx, func() error { m.s.lease(c.l, p, c.r.Lease); return nil }); err != nil {
			return false, err
		}
		c.ends = sent.Add(c.r.Lease - margin)
	}
	granted := false
	_ = m.s.do(func() error { c.token = p.token; granted = p.granted; return nil })
	m.mu.Lock()
	defer m.mu.Unlock()
	if !granted || m.session != s {
		return false, nil
	}
	s.claims[c] = struct{}{}
	return true, nil
}

func (m *Driver) background(f func()) {
	m.tasks.Go(f)
}

// remove removes a place from the store.
func (m *Driver) remove(ctx context.Context, l line, id lock.Owner) error {
	for unknown := false; ; unknown = true {
		found := false
		err := m.request(ctx, func() error { found = m.s.leave(l, id); return nil })
		if err == nil && !found && !unknown {
			return lock.ErrLost
		}
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

// Token implements driver.Claim.
func (c *claim) Token() int64 { return c.token }

// Until implements driver.Claim.
func (c *claim) Until() time.Time {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if !c.ends.IsZero() && c.ends.Before(c.s.until) {
		return c.ends
	}
	return c.s.until
}

// Extend implements driver.Claim.
func (c *claim) Extend(ctx context.Context, lease time.Duration) error {
	sent := time.Now()
	err := c.m.request(ctx, func() error {
		i := slices.IndexFunc(c.m.s.lines[c.l], func(p *place) bool { return p.id == c.r.Owner })
		if i < 0 {
			return lock.ErrLost
		}
		if p := c.m.s.lines[c.l][i]; p.timer != nil {
			c.m.s.lease(c.l, p, lease)
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if until := sent.Add(lease - margin); !c.ends.IsZero() && until.After(c.ends) {
		c.ends = until
	}
	return nil
}

// Release implements driver.Claim.
func (c *claim) Release(ctx context.Context) error {
	c.m.mu.Lock()
	delete(c.s.claims, c)
	c.m.mu.Unlock()
	err := c.m.remove(ctx, c.l, c.r.Owner)
	if err != nil && !errors.Is(err, lock.ErrLost) {
		c.m.background(func() { _ = c.m.remove(c.m.ctx, c.l, c.r.Owner) })
		return fmt.Errorf("%w: %w", lock.ErrIndeterminate, err)
	}
	return err
}

// Close implements driver.Driver.
func (m *Driver) Close() {
	m.cancel()
	m.tasks.Wait()
	m.mu.Lock()
	s := m.session
	m.mu.Unlock()
	if s != nil {
		_ = m.request(context.Background(), func() error { m.s.end(s.remote); return nil })
	}
}

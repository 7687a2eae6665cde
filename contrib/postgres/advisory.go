package pglock

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Advisory makes locks that are advisory locks of sessions. NewAdvisory creates it. Lock and RWLock have no tokens, and
// Semaphore is not supported.
type Advisory struct{ *driver.Client }

// NewAdvisory returns a client that connects like pool, with connections of its own: it takes none from the pool, and its
// end does not close the pool. It blocks until the first connection is made or ctx ends, for 5 s at most.
//
// The error matches lock.ErrInvalid for an invalid option, lock.ErrUnavailable if the server cannot be reached or is a
// standby, and lock.ErrUnsupported if there is a pooler before the server, or if that only pretends to have advisory locks.
func NewAdvisory(ctx context.Context, pool *pgxpool.Pool, opts ...Option) (*Advisory, error) {
	const store = "postgres"
	c, err := resolve(advisoryKind, pool, opts)
	if err != nil {
		return nil, configured(ctx, store, err)
	}

	d := newAdvisory(pool, c)
	if _, err := d.shared(ctx); err != nil {
		d.Close()
		return nil, configured(ctx, store, err)
	}
	return &Advisory{driver.NewClient(d, c.client...)}, nil
}

// Key returns the key of the advisory lock for a name: the first 8 bytes of its SHA-256, in big-endian order. Two names
// with the same key would exclude each other; among a million names there are two with a probability of 1 in 37 million.
func Key(name string) int64 {
	sum := sha256.Sum256([]byte(name))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// advisory is the driver of an Advisory.
//
// One session, main, asks for locks that may be free. To wait, a request gets a session that has no locks, waits there in
// the queue of the server, and has its lock there.
type advisory struct {
	config
	dialer
	gates gates[int64]

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup // goroutines that run until then

	mu         sync.Mutex
	main       *session // nil until it is needed again
	connecting *attempt // to make main
	sessions   map[*session]struct{}
	idle       []*session // without users
	dialing    int        // sessions other than main that are being made
	closed     bool
}

const (
	// maxIdle is how many sessions are kept for the next request that waits.
	maxIdle = 2
	// retryPause is the pause after an attempt that has failed, or without a session to wait on.
	retryPause = 250 * time.Millisecond
	// probeAfter is after what time without an answer a request that waits asks whether the lock is taken.
	probeAfter = 20 * time.Millisecond
)

func newAdvisory(pool *pgxpool.Pool, c config) *advisory {
	d := &advisory{config: c, dialer: dialer{pool, c.ttl}, sessions: make(map[*session]struct{})}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.work.Go(d.tend)
	return d
}

// Store implements driver.Driver.
func (d *advisory) Store() string { return "postgres" }

// CheckName implements driver.Driver.
func (d *advisory) CheckName(name string) error { return checkText("the name", name, maxName) }

// Acquire implements driver.Driver.
func (d *advisory) Acquire(ctx context.Context, r driver.Request) (driver.Claim, error) {
	if r.Permits > 0 {
		return nil, fmt.Errorf("%w: PostgreSQL has no semaphores among its advisory locks", lock.ErrUnsupported)
	}

	key := d.key(r.Name)
	g, e := d.gates.enter(ctx, key, r.Shared, urgency{r.Try, r.FailFast})
	if e.err != nil {
		d.free(e.on)
		return nil, e.err
	}

	c := &advisoryClaim{d: d, key: key, shared: r.Shared, gate: g, lost: r.Lost, on: e.on}
	var err error
	if e.first {
		err = d.takeFirst(ctx, r, c, e.joins)
	} else {
		if c.joins = e.joins; c.joins {
			d.free(c.on)
			c.on = nil
		}
		err = d.take(ctx, r, c)
	}
	for err == nil && !d.begin(c) {
		err = d.take(ctx, r, c)
	}
	if err == nil {
		return c, nil
	}
	if err != errLeft {
		c.leave()
		return nil, err
	}
	return nil, c.err
}

// errLeft means that the caller has left a request, whose answer makes it leave the gate. The claim has the error.
var errLeft = errors.New("left")

// take acquires the lock for a claim that is inside of its gate.
func (d *advisory) take(ctx context.Context, r driver.Request, c *advisoryClaim) error {
	for {
		if c.on != nil && c.on.ended() != nil {
			d.free(c.on)
			c.on = nil
		}
		var granted bool
		var err error
		if waits := !r.Try && !r.FailFast; waits && (c.on != nil || !c.joins && d.hasWaiter(c)) {
			granted, err = d.wait(ctx, c)
		} else {
			granted, err = d.tryOnce(ctx, r, c)
			if err == nil && !granted && !r.Try {
				granted, err = d.wait(ctx, c)
			}
		}
		if err == errLeft || err == nil && granted {
			return err
		}

		if err == nil {
			err = lock.ErrNotAcquired
		} else if temporary(err) {
			c.refused.Store(false)
			c.gate.heard(err)
		}
		if r.Try || !errors.Is(err, lock.ErrNotAcquired) && (r.FailFast || !temporary(err)) {
			return err
		}

		select {
		case <-time.After(retryPause):
		case <-ctx.Done():
			return err
		}
	}
}

// takeFirst acquires the lock for the reader on whose answer the next ones wait. It does not join others on the main session,
// but asks behind the writers in the queue of the server. The main session then gets the lock, too, for the next readers. The
// error is errLeft, as of ask.
func (d *advisory) takeFirst(ctx context.Context, r driver.Request, c *advisoryClaim, joins bool) error {
	if joins && !d.hasWaiter(c) {
		connecting, cancel := bound(ctx, r.FailFast)
		defer cancel()
		c.on = d.waiter(connecting)
	}
	err := d.take(ctx, r, c)
	if err != nil || c.on == nil {
		c.gate.admit(err == nil)
		return err
	}

	s := c.on
	c.on = nil
	moved, err := d.tryOnce(ctx, r, c)
	if moved || err == errLeft {
		s.send(unlockAll, 0, nil)
		d.free(s)
	} else { // a writer waits again
		c.on = s
		c.s = s
		err = nil
	}
	c.gate.admit(moved)
	return err
}

// tryOnce asks for the lock once, and reports whether a session has it for the claim.
func (d *advisory) tryOnce(ctx context.Context, r driver.Request, c *advisoryClaim) (bool, error) {
	s := c.on
	if s == nil {
		connecting, cancel := bound(ctx, r.FailFast)
		defer cancel()
		main, err := d.shared(connecting)
		if err != nil {
			return false, err
		}
		s = main
	}

	a, err := d.ask(ctx, s, c.query(tryLock, tryShared), c, r.FailFast)
	if err != nil {
		return false, err
	}
	if a.value != yes {
		c.refused.Store(true)
		return false, nil
	}
	c.s = s
	return true, nil
}

// wait has the server grant the lock in its turn, and reports whether a session has it for the claim. If there is no session to
// wait on, it returns false at once.
func (d *advisory) wait(ctx context.Context, c *advisoryClaim) (bool, error) {
	if c.on == nil {
		c.on = d.waiter(ctx)
	}
	s := c.on
	if s == nil {
		return false, nil
	}

	a, err := d.ask(ctx, s, c.query(waitLock, waitShared), c, false)
	if err != nil && err != errLeft {
		s.send(unlockAll, 0, nil) // a cancellation that comes late ends the request, and not the lock
	}
	if err == nil && time.Since(a.sent) > d.config.ttl/3 {
		// The answer to an old request does not show how long the session lasts.
		_, err = d.ask(ctx, s, ping, c, false)
	}
	if err != nil {
		return false, err
	}
	c.s = s
	return true, nil
}

// ask makes a request for a claim, and blocks until the answer or until ctx ends. With failFast it gives up after patience.
// The error is errLeft if it has left the request.
func (d *advisory) ask(ctx context.Context, s *session, q query, c *advisoryClaim, failFast bool) (answer, error) {
	r, answers := s.ask(q, c.key)
	if r == nil {
		return answer{}, unavailable(s.ended())
	}

	bounded, cancel := bound(ctx, failFast)
	defer cancel()
	if q.waits() && !c.refused.Load() {
		unsure := time.AfterFunc(probeAfter, func() { d.probe(c) })
		defer unsure.Stop()
	}
	a, arrived := s.await(bounded, answers)
	if !arrived && d.leave(ctx, s, c, r) {
		return a, errLeft
	}
	if !arrived {
		a = <-answers
	}

	if a.err == nil {
		c.gate.heard(nil)
		return a, nil
	}
	if errors.Is(a.err, errSession) {
		return a, unknown(a.err)
	}
	return a, failed(a.err)
}

// probe finds out whether the lock is taken, for a claim that waits for it.
func (d *advisory) probe(c *advisoryClaim) {
	d.mu.Lock()
	main := d.main
	d.mu.Unlock()
	if main == nil {
		return
	}
	main.send(c.query(tryLock, tryShared), c.key, func(a answer) {
		if a.value == yes { // ahead of the request that waits
			main.send(c.query(unlock, unlockShared), c.key, nil)
		}
		if a.err == nil {
			c.refused.Store(true)
			c.gate.heard(nil)
		}
	})
}

// leave has the answer to a request undone, unless it has arrived.
func (d *advisory) leave(ctx context.Context, s *session, c *advisoryClaim, r *call) bool {
	q := r.q
	s.givenUp.Store(q.waits())
	left := s.leave(r, func(a answer) {
		s.givenUp.Store(false)
		if q.waits() || q == ping {
			s.send(unlockAll, 0, nil)
		} else if a.value == yes {
			s.send(c.query(unlock, unlockShared), c.key, nil)
		}
		c.leave()
	})
	if !left {
		s.givenUp.Store(false)
		return false
	}

	c.err = lock.ErrNotAcquired
	if !c.refused.Load() || ctx.Err() == nil {
		c.err = unknown(fmt.Errorf("the server has not answered for %v", time.Since(r.sent).Round(time.Millisecond)))
	}
	if q.waits() {
		d.unblock(s)
	} else if time.Since(r.sent) >= patience {
		c.gate.heard(c.err)
	}
	return true
}

// begin makes the claim one of the session that has it. It reports false if that has ended.
func (d *advisory) begin(c *advisoryClaim) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.s.gone {
		return false
	}
	c.s.claims[c] = struct{}{}
	return true
}

// advisoryClaim is a claim of an Advisory.
type advisoryClaim struct {
	d      *advisory
	key    int64
	shared bool
	gate   *gate[int64]
	lost   func(lock.Reason, error)
	joins  bool     // readers whose lock the main session has
	on     *session // that it uses, or nil for the main session
	s      *session // that has it
	err    error    // of a request that the caller has left

	refused atomic.Bool // by the latest answer
}

// query returns one of the queries of both kinds of locks.
func (c *advisoryClaim) query(exclusive, shared query) query {
	if c.shared {
		return shared
	}
	return exclusive
}

// leave leaves the gate. The next one inside gets the session.
func (c *advisoryClaim) leave() {
	c.d.free(c.gate.leave(c.on))
	c.on = nil
}

// Token implements driver.Claim: there are no tokens.
func (c *advisoryClaim) Token() int64 { return 0 }

// Until implements driver.Claim.
func (c *advisoryClaim) Until() time.Time { return c.s.certain() }

// Extend implements driver.Claim: the claim lasts until its Release, so it is enough that the session is there.
func (c *advisoryClaim) Extend(ctx context.Context, _ time.Duration) error {
	a, err := c.request(ctx, ping, nil)
	if err != nil {
		return err
	}
	return a.err
}

// Release implements driver.Claim.
func (c *advisoryClaim) Release(ctx context.Context) error {
	c.d.mu.Lock()
	_, has := c.s.claims[c]
	delete(c.s.claims, c)
	c.d.mu.Unlock()
	if !has {
		return lock.ErrLost
	}

	// The next request for the key is sent behind the unlock, without waiting for the answer.
	a, err := c.request(ctx, c.query(unlock, unlockShared), c.leave)
	if err != nil {
		return err
	}
	if a.err != nil {
		return unknown(a.err) // the session has ended with it
	}
	if a.value != yes {
		return lock.ErrLost
	}
	return nil
}

// request makes a request on the session that has the claim, calls then, and blocks until the answer or until ctx ends.
func (c *advisoryClaim) request(ctx context.Context, q query, then func()) (answer, error) {
	sent, answers := c.s.ask(q, c.key)
	if then != nil {
		then()
	}
	if sent == nil {
		return answer{}, lock.ErrLost
	}

	a, arrived := c.s.await(ctx, answers)
	if !arrived {
		return answer{}, unknown(errors.New("the server has not answered in time"))
	}
	if errors.Is(a.err, errSession) {
		return a, unknown(a.err)
	}
	return a, nil
}

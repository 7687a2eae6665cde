package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// redAnswer is the answer of a fake member to an attempt.
type redAnswer struct {
	after time.Duration
	err   error // nil: granted
	deaf  bool  // it answers even if the context is done
}

const (
	redQuick = time.Millisecond
	redSlow  = 30 * time.Millisecond
	// redPatience is the server timeout for a lease of a second.
	redPatience = 50 * time.Millisecond
	redLate     = 80 * time.Millisecond
	redLease    = time.Second
	redValid    = redLease - redLease/100 - 2*time.Millisecond
)

var (
	errRedTaken = fmt.Errorf("%w: held by another owner", lock.ErrNotAcquired)
	errRedBoom  = &net.OpError{Op: "dial", Err: errors.New("boom")} // nothing was sent

	redYes     = redAnswer{after: redQuick}
	redTaken   = redAnswer{after: redQuick, err: errRedTaken}
	redFails   = redAnswer{after: redQuick, err: errRedBoom}
	redSlowYes = redAnswer{after: redSlow}
	redSlowErr = redAnswer{after: redSlow, err: errRedBoom}
	redHangs   = redAnswer{after: time.Hour}
	redLateYes = redAnswer{after: redLate, deaf: true}

	redAnswers = []redAnswer{redYes, redTaken, redFails, redSlowYes, redSlowErr, redHangs, redLateYes}
)

// redFake is the protocol of a lock whose server is a fake.
type redFake struct {
	engine.Protocol
	e    *engine.Engine
	name string

	mu      sync.Mutex
	answers []redAnswer // one for each attempt; the last one is for all that follow
	asked   []time.Time
	leases  []time.Duration
	holds   []*redFakeHold
	trying  int  // attempts under way
	alone   bool // it refuses an attempt while somebody has a hold

	// The rest applies to its current holds.
	extend redAnswer
	unlock redAnswer
}

// redFakeHold is a hold that a fake has granted.
type redFakeHold struct {
	id       string
	until    time.Time
	released bool
	gone     bool
	extended []time.Duration
}

func (h *redFakeHold) current() bool { return !h.released && !h.gone && !time.Now().After(h.until) }

// redFakeLock is a lock of that protocol.
type redFakeLock struct {
	*engineLock
	engine.Member
}

type engineLock = engine.Lock // whose name is no field, since Lock is a method

func (*redFakeLock) Do(context.Context, func(context.Context) error, ...lock.Option) error {
	panic("not used")
}

func (f *redFake) lock() lock.Locker {
	l := engine.NewLock(f.e, f, f.name, nil)
	return &redFakeLock{&l, l.Member()}
}

// Kind implements engine.Protocol. No two fakes are of one kind.
func (f *redFake) Kind() engine.Kind { return engine.Kind{Name: fmt.Sprintf("%p", f)} }

func (*redFake) Channel(*engine.Claim) string { return "" }

func (f *redFake) Renewer() watchdog.Renewer { return f }

func (a redAnswer) wait(ctx context.Context) error {
	if a.deaf {
		ctx = context.WithoutCancel(ctx)
	}
	if a.after == 0 {
		return a.err
	}
	select {
	case <-time.After(a.after):
		return a.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (f *redFake) Acquire(ctx context.Context, c *engine.Claim) (engine.Answer, error) {
	f.mu.Lock()
	f.asked, f.leases = append(f.asked, time.Now()), append(f.leases, c.Lease)
	a := f.answers[0]
	if len(f.answers) > 1 {
		f.answers = f.answers[1:]
	}
	f.trying++
	f.mu.Unlock()
	err := a.wait(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.trying--
	if err == errRedTaken || err == nil && f.alone && f.heldLocked() > 0 {
		return engine.Answer{FreeIn: -1}, nil
	}
	if err != nil {
		return engine.Answer{}, err
	}
	f.holds = append(f.holds, &redFakeHold{id: c.ID.String(), until: time.Now().Add(c.Lease)})
	return engine.Answer{Acquired: true}, nil
}

func (f *redFake) Release(ctx context.Context, c *engine.Claim) (engine.Release, error) {
	f.mu.Lock()
	a := f.unlock
	f.mu.Unlock()
	err := a.wait(context.WithoutCancel(ctx))
	f.mu.Lock()
	defer f.mu.Unlock()
	state := engine.NotHeld
	if h := f.holdLocked(c.ID.String()); h != nil {
		if h.current() {
			state = engine.Free
		}
		h.released = true
	}
	return engine.Release{State: state, Receivers: -1}, err
}

func (f *redFake) Renew(ctx context.Context, batches [][]watchdog.Subject, ttl time.Duration, _ bool) []watchdog.Renewed {
	f.mu.Lock()
	a := f.extend
	f.mu.Unlock()
	err := a.wait(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	results := make([]watchdog.Renewed, len(batches))
	for b, batch := range batches {
		results[b].Err = err
		for _, subject := range batch {
			h := f.holdLocked(subject.Owner)
			held := h != nil && h.current()
			if held && err == nil {
				h.extended = append(h.extended, ttl)
				if until := time.Now().Add(ttl); until.After(h.until) {
					h.until = until
				}
			}
			results[b].Held = append(results[b].Held, held)
		}
	}
	return results
}

func (f *redFake) holdLocked(id string) *redFakeHold {
	for _, h := range f.holds {
		if h.id == id {
			return h
		}
	}
	return nil
}

func (f *redFake) heldLocked() (n int) {
	for _, h := range f.holds {
		if !h.released {
			n++
		}
	}
	return n
}

// held returns the number of holds that are not released.
func (f *redFake) held() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.heldLocked()
}

func (f *redFake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *redFake) attempts() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked)
}

// redConn is a connection without a server.
type redConn struct {
	rueidis.Client
	mode rueidis.ClientMode
}

func (c redConn) Mode() rueidis.ClientMode { return c.mode }

func (redConn) B() rueidis.Builder { return rueidis.Builder{} }

// Do returns nothing, so that a cluster cannot be identified.
func (redConn) Do(context.Context, rueidis.Completed) rueidis.RedisResult {
	return rueidis.RedisResult{}
}

// redSession returns the session of a client. That of a cluster, which does not say who it is, has members.
func redSession(log *harness.Log, mode rueidis.ClientMode) *session.Session {
	return session.New(session.Config{
		Client: redConn{mode: mode}, ID: "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11", WatchdogTimeout: redLease, FairWait: time.Minute, Turn: 10 * time.Millisecond,
		MapName: func(s string) string { return s }, Logger: log.Logger(),
	})
}

// redWorld is a session without servers.
type redWorld struct {
	t       *testing.T
	s       *session.Session
	mu      sync.Mutex
	all     *multilock.Shared // of allOf; see groups
	allOf   *session.Session
	log     *harness.Log
	members []*session.Session // those of the fakes
}

// redRun runs a test with redLease as the watchdog timeout.
func redRun(t *testing.T, test func(t *testing.T, w *redWorld)) {
	synctest.Test(t, func(t *testing.T) {
		log := &harness.Log{}
		w := &redWorld{t: t, s: redSession(log, rueidis.ClientModeStandalone), log: log}
		defer synctest.Wait()
		defer w.s.Close()
		test(t, w)
	})
}

func (w *redWorld) fakes(answers ...redAnswer) []*redFake {
	fakes := make([]*redFake, len(answers))
	for i, a := range answers {
		fakes[i] = &redFake{e: engine.New(w.member(i)), name: "orders", answers: []redAnswer{a}}
	}
	return fakes
}

// member returns the session of the i-th fakes.
func (w *redWorld) member(i int) *session.Session {
	for len(w.members) <= i {
		s := redSession(w.log, rueidis.ClientModeCluster)
		w.t.Cleanup(s.Close)
		s.AwaitServer() // so that no Redlock awaits it
		w.members = append(w.members, s)
	}
	return w.members[i]
}

func (w *redWorld) red(fakes []*redFake, opts ...multilock.Option) *multilock.Red {
	var members []lock.Locker
	for _, f := range fakes {
		members = append(members, f.lock())
	}
	return multilock.NewRed(w.groups(), members, opts...)
}

// groups returns what the groups of the session share.
func (w *redWorld) groups() *multilock.Shared {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.allOf != w.s {
		w.all, w.allOf = multilock.NewShared(engine.New(w.s)), w.s
	}
	return w.all
}

// drain waits for everything that was begun, and checks that every hold of a fake was
// released.
func (w *redWorld) drain(fakes []*redFake, what ...any) {
	w.t.Helper()
	redSleep(time.Minute)
	for i, f := range fakes {
		require.Zero(w.t, f.trying, "attempts of member %d: %v", i, what)
		require.Zero(w.t, f.held(), "member %d: %v", i, what)
	}
}

// redSleep sleeps until all pending events have happened.
func redSleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

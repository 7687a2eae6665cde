package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
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
	errRedBoom  = errors.New("boom")

	redYes     = redAnswer{after: redQuick}
	redTaken   = redAnswer{after: redQuick, err: errRedTaken}
	redFails   = redAnswer{after: redQuick, err: errRedBoom}
	redSlowYes = redAnswer{after: redSlow}
	redSlowErr = redAnswer{after: redSlow, err: errRedBoom}
	redHangs   = redAnswer{after: time.Hour}
	redLateYes = redAnswer{after: redLate, deaf: true}

	redAnswers = []redAnswer{redYes, redTaken, redFails, redSlowYes, redSlowErr, redHangs, redLateYes}
)

// redFake is a member without a server.
type redFake struct {
	t    *testing.T
	e    *engine.Engine
	name string

	mu      sync.Mutex
	answers []redAnswer // one for each attempt; the last one is for all that follow
	asked   []time.Time
	leases  []time.Duration
	holds   []*redFakeHold
	trying  int    // attempts under way
	given   func() // called with each grant; may be nil
	alone   bool   // it tracks its holder

	// The rest applies to its current holds.
	extend redAnswer
	unlock redAnswer
}

// redProtocol is the protocol of a fake. No two fakes are of one kind.
type redProtocol struct {
	engine.Protocol
	f *redFake
}

func (p redProtocol) Kind() engine.Kind { return engine.Kind{Name: fmt.Sprintf("%p", p.f)} }

// redFakeMember is a fake as a member of a Redlock.
type redFakeMember struct {
	*engine.Lock
	f *redFake
}

func (f *redFake) member() redFakeMember {
	l := engine.NewLock(f.e, redProtocol{f: f}, f.name, nil)
	return redFakeMember{&l, f}
}

func (m redFakeMember) TryMember(ctx context.Context, lease time.Duration) (engine.MemberHold, error) {
	return m.f.try(ctx, lease)
}

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

func (f *redFake) try(ctx context.Context, lease time.Duration) (*redFakeHold, error) {
	f.mu.Lock()
	f.asked, f.leases = append(f.asked, time.Now()), append(f.leases, lease)
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
	if err != nil {
		return nil, err
	}
	if f.alone && f.heldNow() > 0 {
		return nil, errRedTaken
	}
	if f.given != nil {
		f.given()
	}
	h := &redFakeHold{f: f, until: time.Now().Add(lease)}
	f.holds = append(f.holds, h)
	return h, nil
}

// heldNow is called with f.mu held.
func (f *redFake) heldNow() (n int) {
	for _, h := range f.holds {
		if h.unlocked == 0 {
			n++
		}
	}
	return n
}

// held returns the number of holds that are not released.
func (f *redFake) held() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.heldNow()
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

// redFakeHold is a hold of a fake.
type redFakeHold struct {
	lock.Hold
	f        *redFake
	until    time.Time
	unlocked int
	gone     bool
	extended []time.Duration
}

func (h *redFakeHold) One() *engine.Hold   { return nil }
func (h *redFakeHold) Receivers() int      { return -1 }
func (h *redFakeHold) KeepUntil(time.Time) {}
func (h *redFakeHold) Disown()             {}

func (h *redFakeHold) Extend(ctx context.Context, lease time.Duration) error {
	h.f.mu.Lock()
	a := h.f.extend
	h.f.mu.Unlock()
	if err := a.wait(ctx); err != nil {
		return err
	}
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if h.gone || h.unlocked > 0 || time.Now().After(h.until) {
		return &lock.LostError{Name: h.f.name, Reason: lock.ReasonGone}
	}
	h.extended = append(h.extended, lease)
	if until := time.Now().Add(lease); until.After(h.until) {
		h.until = until
	}
	return nil
}

func (h *redFakeHold) Unlock(ctx context.Context) error {
	h.f.mu.Lock()
	a := h.f.unlock
	h.f.mu.Unlock()
	err := a.wait(context.WithoutCancel(ctx))
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.unlocked++
	if err == nil && (h.gone || time.Now().After(h.until)) {
		return &lock.LostError{Name: h.f.name, Reason: lock.ReasonGone}
	}
	return err
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

const redID = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"

func redSession(log *harness.Log, watchdog time.Duration) *session.Session {
	return redSessionOf(redConn{mode: rueidis.ClientModeStandalone}, log, watchdog)
}

func redSessionOf(conn redConn, log *harness.Log, watchdog time.Duration) *session.Session {
	return session.New(session.Config{
		Client: conn, ID: redID, WatchdogTimeout: watchdog, FairWait: time.Minute, HandOffs: 16,
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
		w := &redWorld{t: t, s: redSession(log, redLease), log: log}
		defer synctest.Wait()
		defer w.s.Close()
		test(t, w)
	})
}

func (w *redWorld) fakes(answers ...redAnswer) []*redFake {
	fakes := make([]*redFake, len(answers))
	for i, a := range answers {
		fakes[i] = &redFake{t: w.t, e: engine.New(w.member(i)), name: "orders", answers: []redAnswer{a}}
	}
	return fakes
}

// member returns the session of the i-th fakes.
func (w *redWorld) member(i int) *session.Session {
	for len(w.members) <= i {
		s := redSessionOf(redConn{mode: rueidis.ClientModeCluster}, w.log, redLease)
		w.t.Cleanup(s.Close)
		multilock.WasAsked(s)
		w.members = append(w.members, s)
	}
	return w.members[i]
}

func (w *redWorld) red(fakes []*redFake) *multilock.Red {
	members := make([]multilock.RedMember, len(fakes))
	for i, f := range fakes {
		members[i] = f.member()
	}
	return multilock.NewRedOf(w.groups(), members)
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
// released exactly once.
func (w *redWorld) drain(fakes []*redFake, what ...any) {
	w.t.Helper()
	redSleep(time.Minute)
	for i, f := range fakes {
		require.Zero(w.t, f.trying, "attempts of member %d: %v", i, what)
		for _, h := range f.holds {
			require.Equal(w.t, 1, h.unlocked, "member %d: %v", i, what)
		}
	}
}

// redSleep sleeps until all pending events have happened.
func redSleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

package pglock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// gates orders the requests of this client for each key. Only those that do not exclude each other are sent, and the others
// wait here in the order in which they came. So a key that is contended in one process costs the server one waiter, and
// a session, which would grant itself a lock twice, is not asked to.
type gates[K comparable] struct {
	mu   sync.Mutex
	open map[K]*gate[K]
}

// gate is the order of the requests for one key. The mutex of the gates guards it.
type gate[K comparable] struct {
	all     *gates[K]
	key     K
	inside  int
	shared  bool // those inside, if there are any
	waiting []*turn

	// A session that has a shared lock gets it again at once, ahead of the writers of other processes. So one reader after the
	// other is the first, for whose answer from the server the next ones wait. Then they join it for a moment.
	asking   bool      // there is a first one without an answer
	answered time.Time // the first one before

	// What those inside have heard: whether the lock is taken, or why the server could not be asked.
	taken bool
	down  error
}

// turn is a request that waits at a gate.
type turn struct {
	shared bool
	urgency
	come chan entrance // receives once
}

// urgency is what a request does not wait for.
type urgency struct {
	try      bool // others
	failFast bool // a server that cannot be reached
}

// entrance is the end of a wait at a gate: with an error, or on the session of the one before, on which the unlock is ahead
// of what is sent now, or nil.
type entrance struct {
	on    *session
	first bool // of the next readers
	joins bool // readers that have the lock
	err   error
}

// joinTime is how long readers join others after the server has answered the first one.
const joinTime = 100 * time.Millisecond

// patience is how long a request waits for an answer until the server counts as unreachable.
const patience = 2 * time.Second

// bound returns a context that ends with ctx, or after patience if the request does not wait for the server.
func bound(ctx context.Context, failFast bool) (context.Context, context.CancelFunc) {
	if failFast {
		return context.WithTimeout(ctx, patience)
	}
	return ctx, func() {}
}

// enter blocks until the request is inside or ctx ends. The caller has to use or to free the session, also after an error.
func (gs *gates[K]) enter(ctx context.Context, key K, shared bool, u urgency) (*gate[K], entrance) {
	gs.mu.Lock()
	g := gs.open[key]
	if g == nil {
		g = &gate[K]{all: gs, key: key}
		if gs.open == nil {
			gs.open = make(map[K]*gate[K])
		}
		gs.open[key] = g
	}

	ahead := len(g.waiting) > 0 && !(u.try && g.waiting[0].shared) // an attempt does not wait for the first reader
	if !ahead && g.admitsLocked(shared, u.try) {
		e := g.passLocked(shared, u.try)
		gs.mu.Unlock()
		return g, e
	}
	if err := g.refusesLocked(u); err != nil {
		gs.mu.Unlock()
		return nil, entrance{err: err}
	}
	t := &turn{shared, u, make(chan entrance, 1)}
	g.waiting = append(g.waiting, t)
	gs.mu.Unlock()

	var late <-chan time.Time
	if u.failFast {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		late = timer.C
	}
	for {
		select {
		case e := <-t.come:
			return g, e
		case <-late:
			if g.isTaken() {
				late = nil
				continue
			}
		case <-ctx.Done():
		}
		unused, err := g.abandon(t)
		return nil, entrance{on: unused, err: err}
	}
}

func (g *gate[K]) admitsLocked(shared, try bool) bool {
	return g.inside == 0 || shared && g.shared && (!g.asking || try)
}

func (g *gate[K]) passLocked(shared, try bool) entrance {
	e := entrance{joins: g.inside > 0}
	if g.inside == 0 {
		g.taken = false
	}
	e.first = shared && !try && (!e.joins || time.Since(g.answered) > joinTime)
	g.asking = g.asking || e.first
	g.inside++
	g.shared = shared
	return e
}

// admit admits the readers behind the first one, which join it, or of which one is the next first.
func (g *gate[K]) admit(join bool) {
	g.all.mu.Lock()
	defer g.all.mu.Unlock()
	g.asking = false
	if join {
		g.answered = time.Now()
	}
	g.admitLocked(nil)
}

// refusesLocked returns the error of a request that does not wait, or nil.
func (g *gate[K]) refusesLocked(u urgency) error {
	if u.failFast && g.down != nil {
		return g.down
	}
	if u.try && g.taken {
		return g.errLocked()
	}
	return nil
}

// errLocked returns the error for the end of a wait.
func (g *gate[K]) errLocked() error {
	if g.down != nil {
		return g.down
	}
	if g.taken {
		return fmt.Errorf("%w: this process has it, or waits for it", lock.ErrNotAcquired)
	}
	return unavailable(errors.New("the server has not answered the request before"))
}

func (g *gate[K]) isTaken() bool {
	g.all.mu.Lock()
	defer g.all.mu.Unlock()
	return g.taken && g.down == nil
}

// abandon ends a wait, and returns its error.
func (g *gate[K]) abandon(t *turn) (unused *session, err error) {
	g.all.mu.Lock()
	err = g.errLocked()
	i := slices.Index(g.waiting, t)
	if i >= 0 {
		g.waiting = slices.Delete(g.waiting, i, i+1)
		g.admitLocked(nil) // readers behind a writer
	}
	g.all.mu.Unlock()

	if i < 0 {
		e := <-t.come
		if e.first {
			g.admit(false)
		}
		if e.err == nil {
			unused = g.leave(e.on)
		}
	}
	return unused, err
}

// leave admits those that come next, the first of which gets the session. It returns the session if nobody does.
func (g *gate[K]) leave(on *session) (unused *session) {
	g.all.mu.Lock()
	defer g.all.mu.Unlock()

	g.inside--
	if g.inside > 0 { // readers that have it
		g.taken = true
		g.down = nil
	}
	unused = g.admitLocked(on)
	if g.inside == 0 {
		delete(g.all.open, g.key)
	}
	return unused
}

func (g *gate[K]) admitLocked(on *session) (unused *session) {
	for len(g.waiting) > 0 && g.admitsLocked(g.waiting[0].shared, g.waiting[0].try) {
		t := g.waiting[0]
		g.waiting = g.waiting[1:]
		e := g.passLocked(t.shared, t.try)
		e.on = on
		t.come <- e
		on = nil
	}
	return on
}

// heard notes what one inside has heard: that the lock is taken, by it or by others, or why the server could not be asked.
// Those that do not wait for that leave.
func (g *gate[K]) heard(err error) {
	g.all.mu.Lock()
	defer g.all.mu.Unlock()

	g.down = err
	g.taken = err == nil
	g.waiting = slices.DeleteFunc(g.waiting, func(t *turn) bool {
		err := g.refusesLocked(t.urgency)
		if err != nil {
			t.come <- entrance{err: err}
		}
		return err != nil
	})
	g.admitLocked(nil)
}

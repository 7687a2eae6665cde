package engine

import (
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

const (
	handOffs = 4
	patience = 30 * time.Second
	latency  = time.Millisecond
)

var key = Key{Kind: "lock", Name: "orders"}

// world is a server with one key, the hub, and the queues of one process.
type world struct {
	*Queues
	t *testing.T

	mu        sync.Mutex
	taken     bool
	freeIn    time.Duration // what a failed attempt is told
	err       error
	attempts  int
	inFlight  int
	listeners map[pubsub.Listener]bool
	deaf      bool // subscriptions are never confirmed and hear nothing
	close     context.CancelFunc
}

func run(t *testing.T, test func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		wheel := watchdog.NewWheel(nil)
		defer wheel.Stop()
		open, cancel := context.WithCancel(t.Context())
		w := &world{t: t, freeIn: -1, listeners: map[pubsub.Listener]bool{}, close: cancel}
		w.Queues = newQueues(Config{Open: open, Wheel: wheel, Subscribe: w.subscribe, HandOffs: handOffs, MaxOutage: patience, Go: background(t), OnWait: func() {}})
		test(w)
		synctest.Wait()
		for i := range w.shards {
			assert.Empty(t, w.shards[i].entries, "entries are left")
		}
		assert.Empty(t, w.listeners, "subscriptions are left")
	})
}

func newQueues(cfg Config) *Queues {
	q := new(Queues)
	q.init(cfg)
	return q
}

// background runs what is to run on.
func background(t *testing.T) func(func(context.Context)) bool {
	return func(f func(ctx context.Context)) bool {
		go f(t.Context())
		return true
	}
}

func (w *world) subscribe(_ string, l pubsub.Listener) (func(), bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[l] = true
	if !w.deaf {
		time.AfterFunc(latency, func() { w.notify(pubsub.Event{Subscribed: true}) })
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.listeners, l)
	}, false
}

func (w *world) notify(ev pubsub.Event) {
	w.mu.Lock()
	var all []pubsub.Listener
	for l := range w.listeners {
		all = append(all, l)
	}
	deaf := w.deaf
	w.mu.Unlock()
	for _, l := range all {
		if !deaf {
			l.Notify(ev)
		}
	}
}

// set changes the world between attempts.
func (w *world) set(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

func (w *world) tries() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attempts
}

// caller is somebody who wants the key.
type caller struct {
	w    *world
	name string
	done chan error

	owner    string // "" for none
	relation Relation
	joinErr  error
	joined   int
	refuses  bool // to have the key passed on to it
	mute     bool // there are no messages
}

func (c *caller) TryAll(context.Context, []Acquirer) []Answer { panic("there are no groups") }

func (c *caller) Abandon() {}

func (c *caller) Describe() session.Hold { return session.Hold{Name: c.name} }

func (c *caller) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) { yield(c.Describe()) }
}

func (c *caller) Join(holder Acquirer) (Relation, error) {
	if holder.(*caller).owner != c.owner {
		return Conflict, nil
	}
	if c.relation == Reentrant {
		c.joined++
	}
	return c.relation, c.joinErr
}

func (c *caller) Channel() string {
	if c.mute {
		return ""
	}
	return "channel"
}

func (c *caller) Try(ctx context.Context) (Answer, error) {
	w := c.w
	w.set(func() { w.inFlight++; w.attempts++ })
	defer w.set(func() { w.inFlight-- })
	assert.Equal(w.t, 1, w.inFlightNow(), "attempts of one key at once")
	time.Sleep(latency / 2) // the request is on its way
	v, err := w.judge()
	select { // and now the answer
	case <-time.After(latency / 2):
		return v, err
	case <-ctx.Done():
		if v.Acquired { // it sees to it that nothing is left
			w.releaseElsewhere()
		}
		return Answer{}, &Unavailable{ctx.Err()}
	}
}

// judge is the server's part of an attempt.
func (w *world) judge() (Answer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return Answer{}, w.err
	}
	if w.taken {
		return Answer{FreeIn: w.freeIn}, nil
	}
	w.taken = true
	return Answer{Acquired: true}, nil
}

func (w *world) inFlightNow() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inFlight
}

// ask starts an acquisition.
func (w *world) ask(ctx context.Context, name string, change ...func(*Request)) *caller {
	c := &caller{w: w, name: name, done: make(chan error, 1)}
	req := Request{Key: key, Acquirer: c}
	for _, f := range change {
		f(&req)
	}
	go func() { c.done <- w.Acquire(ctx, &req) }()
	synctest.Wait()
	return c
}

func (c *caller) has() bool {
	synctest.Wait()
	select {
	case err := <-c.done:
		require.NoError(c.w.t, err, c.name)
		return true
	default:
		return false
	}
}

// pass passes the key on to the next waiter, and reports whether it did.
func (w *world) pass() bool {
	return w.Pass(key, w.holder(), func(next Acquirer) bool { return !next.(*caller).refuses })
}

// release passes the key on, or releases it for all.
func (w *world) release() {
	if w.pass() {
		return
	}
	time.Sleep(latency)
	w.set(func() { w.taken = false })
	w.notify(pubsub.Event{Payload: "0"})
	w.Released(key, w.holder(), Release{Receivers: -1})
}

// holder is who holds the key in this process.
func (w *world) holder() *caller {
	holders := w.Holders(key)
	require.Len(w.t, holders, 1)
	return holders[0].(*caller)
}

// elsewhere is another process that has the key.
func (w *world) takeElsewhere() { w.set(func() { w.taken = true }) }

func (w *world) releaseElsewhere() {
	w.set(func() { w.taken = false })
	w.notify(pubsub.Event{Payload: "0"})
}

func TestWaitersAreServedInTheOrderTheyCame(t *testing.T) {
	run(t, func(w *world) {
		var all []*caller
		for range 3 * handOffs {
			all = append(all, w.ask(w.t.Context(), "waiter"))
			time.Sleep(time.Second)
		}
		for i, c := range all {
			time.Sleep(time.Second)
			require.True(t, c.has(), "waiter %d", i)
			for _, later := range all[i+1:] {
				require.False(t, later.has())
			}
			w.release()
		}
	})
}

func TestHandOffsCostNoAttempt(t *testing.T) {
	run(t, func(w *world) {
		first := w.ask(w.t.Context(), "first")
		time.Sleep(2 * latency)
		var rest []*caller
		for range handOffs {
			rest = append(rest, w.ask(w.t.Context(), "rest"))
		}
		time.Sleep(10 * latency)
		before := w.tries()
		require.True(t, first.has())
		for _, c := range rest {
			w.release()
			require.True(t, c.has())
		}
		assert.Equal(t, before, w.tries())
		w.release()
	})
}

func TestAfterItsHandOffsAProcessStandsBack(t *testing.T) {
	run(t, func(w *world) {
		c := w.ask(w.t.Context(), "first")
		time.Sleep(2 * latency)
		var rest []*caller
		for range handOffs + 1 {
			rest = append(rest, w.ask(w.t.Context(), "rest"))
		}
		time.Sleep(10 * latency)
		require.True(t, c.has())
		for _, c := range rest[:handOffs] {
			w.release()
			require.True(t, c.has())
		}
		before := w.tries()
		w.release() // the limit: now it is for all
		last := rest[handOffs]
		time.Sleep(latency)
		w.takeElsewhere()
		time.Sleep(yieldFor / 2)
		require.False(t, last.has())
		assert.Equal(t, before, w.tries())
		for range 2 { // the first release is for a third process
			require.False(t, last.has())
			w.takeElsewhere()
			w.releaseElsewhere()
			time.Sleep(courtesy / 2)
		}
		require.True(t, last.has())
		w.release()
	})
}

func TestALostMessageDelaysAndDoesNotStrand(t *testing.T) {
	for _, tt := range []struct {
		name   string
		freeIn time.Duration
		within time.Duration
	}{
		{"known expiry", time.Second, time.Second + 10*time.Millisecond},
		{"no expiry", -1, safetyPoll + 10*time.Millisecond},
		{"far expiry", time.Hour, safetyPoll + 10*time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run(t, func(w *world) {
				w.deaf, w.freeIn = true, tt.freeIn
				w.takeElsewhere()
				c := w.ask(w.t.Context(), "waiter")
				time.Sleep(2 * latency)
				w.releaseElsewhere()
				time.Sleep(tt.within)
				require.True(t, c.has())
				w.release()
			})
		})
	}
}

func TestAMessageWakesTheHeadAlone(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		a, b := w.ask(w.t.Context(), "a"), w.ask(w.t.Context(), "b")
		time.Sleep(time.Second)
		before := w.tries()
		w.notify(pubsub.Event{Payload: "0"}) // and it is still taken
		time.Sleep(time.Second)
		assert.Equal(t, before+1, w.tries())
		w.releaseElsewhere()
		time.Sleep(2 * latency)
		require.True(t, a.has())
		require.False(t, b.has())
		w.release()
		require.True(t, b.has())
		w.release()
	})
}

func TestAWaiterHearsWhyItTriesAgain(t *testing.T) {
	run(t, func(w *world) {
		hears := func(causes *[]telemetry.Cause) func(*Request) {
			return func(r *Request) { r.OnWake = func(c telemetry.Cause) { *causes = append(*causes, c) } }
		}
		w.takeElsewhere()
		var first, second []telemetry.Cause
		ctx, cancel := context.WithCancel(w.t.Context())
		a := w.ask(ctx, "a", hears(&first))
		b := w.ask(w.t.Context(), "b", hears(&second))
		time.Sleep(10 * latency)
		w.notify(pubsub.Event{Payload: "0"})
		time.Sleep(safetyPoll + 10*latency)
		cancel()
		require.ErrorIs(w.t, <-a.done, lock.ErrNotAcquired)
		time.Sleep(10 * latency)
		w.releaseElsewhere()
		time.Sleep(10 * latency)
		require.True(w.t, b.has())
		var third []telemetry.Cause
		c := w.ask(w.t.Context(), "c", hears(&third))
		time.Sleep(10 * latency)
		w.release()
		require.True(w.t, c.has())
		w.release()
		assert.Equal(w.t, []telemetry.Cause{telemetry.Subscribed, telemetry.Message, telemetry.Timer}, first)
		assert.Equal(w.t, []telemetry.Cause{telemetry.Local, telemetry.Message}, second)
		assert.Equal(w.t, []telemetry.Cause{telemetry.Subscribed, telemetry.HandedOver}, third)
	})
}

func TestTheNextWaiterTakesOverWhenTheHeadLeaves(t *testing.T) {
	for _, how := range []string{"waiting", "trying", "deadline"} {
		t.Run(how, func(t *testing.T) {
			run(t, func(w *world) {
				w.takeElsewhere()
				ctx, cancel := context.WithCancel(w.t.Context())
				head := w.ask(ctx, "head", func(r *Request) {
					if how == "deadline" {
						r.Deadline = time.Now().Add(2 * time.Second)
					}
				})
				next := w.ask(w.t.Context(), "next")
				time.Sleep(time.Second)
				switch how {
				case "waiting":
					cancel()
				case "trying":
					w.releaseElsewhere()
					synctest.Wait()
					cancel()
				case "deadline":
					time.Sleep(time.Second + 10*time.Millisecond)
				}
				require.ErrorIs(t, <-head.done, lock.ErrNotAcquired)
				if how != "trying" {
					w.releaseElsewhere()
				}
				time.Sleep(5 * latency)
				require.True(t, next.has())
				w.release()
				cancel()
			})
		})
	}
}

func TestAWaiterThatRefusesWaitsForTheRelease(t *testing.T) {
	run(t, func(w *world) {
		first := w.ask(w.t.Context(), "first")
		time.Sleep(2 * latency)
		second := w.ask(w.t.Context(), "second")
		second.refuses = true
		time.Sleep(10 * latency)
		require.True(t, first.has())
		require.False(t, w.pass())
		require.Equal(t, []Acquirer{first}, w.Holders(key))
		require.False(t, second.has())
		w.release()
		time.Sleep(2 * latency)
		require.True(t, second.has())
		w.release()
	})
}

func TestOnceDoesNotQueue(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		waiter := w.ask(w.t.Context(), "waiter")
		time.Sleep(time.Second)
		before := w.tries()
		require.ErrorIs(t, w.Acquire(w.t.Context(), &Request{Key: key, Acquirer: &caller{w: w}, Once: true}), lock.ErrNotAcquired)
		require.Equal(t, before+1, w.tries())
		w.releaseElsewhere()
		time.Sleep(2 * latency)
		require.True(t, waiter.has())
		w.release()
	})
}

func (w *world) parked() int {
	waiting, _ := w.Stats()
	return waiting
}

func (w *world) askOwned(o *caller) <-chan error {
	o.w = w
	done := make(chan error, 1)
	go func() { done <- w.Acquire(w.t.Context(), &Request{Key: key, Acquirer: o, Owned: true}) }()
	synctest.Wait()
	return done
}

// A caller of the owner that holds the key joins the holder, refuses, or makes an attempt
// at once, even if others wait.
func TestOwnerThatHolds(t *testing.T) {
	run(t, func(w *world) {
		holder := &caller{owner: "a"}
		time.Sleep(time.Second)
		done := w.askOwned(holder)
		time.Sleep(time.Second)
		require.NoError(t, <-done)
		unregistered := w.ask(w.t.Context(), "unregistered")
		time.Sleep(time.Second)
		before := w.tries()

		joins := &caller{owner: "a", relation: Reentrant}
		require.NoError(t, <-w.askOwned(joins))
		require.Equal(t, 1, joins.joined)
		refused := errors.New("refused")
		require.ErrorIs(t, <-w.askOwned(&caller{owner: "a", joinErr: refused}), refused)
		require.Equal(t, before, w.tries())
		beside := w.askOwned(&caller{owner: "a", relation: SameOwner})
		time.Sleep(2 * latency)
		require.Equal(t, before+1, w.tries())
		require.Equal(t, []Acquirer{holder}, w.Holders(key), "who joins is no holder")

		w.releaseElsewhere()
		w.Released(key, holder, Release{Receivers: -1})
		time.Sleep(10 * time.Second)
		require.True(t, unregistered.has())
		w.release()
		time.Sleep(10 * time.Second)
		require.NoError(t, <-beside)
		w.release()
	})
}

// Waiters of the owner that comes to hold the key join it when they are admitted.
func TestWaitersOfTheOwnerAreAdmitted(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		first, joins := &caller{owner: "a", relation: Reentrant}, &caller{owner: "a", relation: Reentrant}
		other := &caller{owner: "b", relation: Reentrant}
		refused := errors.New("refused")
		ends := w.askOwned(first)
		var waiting []<-chan error
		for _, o := range []*caller{other, joins, {owner: "a", joinErr: refused}} {
			waiting = append(waiting, w.askOwned(o))
		}
		time.Sleep(time.Second)
		w.releaseElsewhere()
		time.Sleep(time.Second)
		require.NoError(t, <-ends)
		require.Equal(t, 3, w.parked())
		w.Admit(key, first)
		require.NoError(t, <-waiting[1])
		require.ErrorIs(t, <-waiting[2], refused)
		synctest.Wait()
		require.Equal(t, 1, w.parked())
		w.Admit(key, other) // which does not hold
		w.releaseElsewhere()
		w.Released(key, first, Release{Receivers: -1})
		time.Sleep(time.Second)
		require.NoError(t, <-waiting[0])
		w.releaseElsewhere()
		w.Released(key, other, Release{Receivers: -1})
	})
}

func TestAnErrorOfTheFirstAttemptIsReturned(t *testing.T) {
	run(t, func(w *world) {
		boom := errors.New("boom")
		w.set(func() { w.err = &Unavailable{boom} })
		err := w.Acquire(w.t.Context(), &Request{Key: key, Acquirer: &caller{w: w}})
		require.ErrorIs(t, err, boom)
		require.Equal(t, 1, w.tries())
		var u *Unavailable
		require.False(t, errors.As(err, &u), "the wrapper stays inside")
	})
}

func TestAWaiterRidesOutAnOutage(t *testing.T) {
	boom := errors.New("boom")
	for _, tt := range []struct {
		name   string
		outage time.Duration
		err    error
		want   error
	}{
		{"short", patience / 2, &Unavailable{boom}, nil},
		{"long", 2 * patience, &Unavailable{boom}, boom},
		{"refused", time.Hour, boom, boom},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run(t, func(w *world) {
				w.takeElsewhere()
				w.freeIn = time.Second
				c := w.ask(w.t.Context(), "waiter")
				time.Sleep(10 * time.Millisecond)
				before := w.tries()
				w.set(func() { w.err = tt.err })
				time.AfterFunc(tt.outage, func() { w.set(func() { w.err, w.taken = nil, false }) })
				err := <-c.done
				if tt.want == nil {
					require.NoError(t, err)
					// Neither hot nor asleep.
					assert.Greater(t, w.tries()-before, int(tt.outage/maxRetry)-2)
					assert.Less(t, w.tries()-before, int(tt.outage/minRetry))
					w.release()
					return
				}
				require.ErrorIs(t, err, tt.want)
				var u *Unavailable
				require.False(t, errors.As(err, &u), "the wrapper stays inside")
			})
		})
	}
}

func TestBackoffWhereNothingIsPublished(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		var asked []int
		c := w.ask(w.t.Context(), "waiter", func(r *Request) {
			r.Acquirer.(*caller).mute = true
			r.Backoff = func(n int) time.Duration {
				asked = append(asked, n)
				return 100 * time.Millisecond
			}
		})
		time.Sleep(450 * time.Millisecond)
		w.set(func() { w.taken = false })
		time.Sleep(110 * time.Millisecond)
		require.True(t, c.has())
		require.Equal(t, []int{1, 2, 3, 4, 5, 6}[:len(asked)], asked)
		require.GreaterOrEqual(t, len(asked), 4)
		w.release()
	})
}

// A panic of Backoff or OnWake ends the wait and leaves nothing.
func TestPanicEndsTheWait(t *testing.T) {
	backoff := func(at int) func(*Request) {
		return func(r *Request) {
			r.Acquirer.(*caller).mute = true
			r.Backoff = func(n int) time.Duration {
				if n == at {
					panic("boom")
				}
				return 10 * time.Millisecond
			}
		}
	}
	wake := func(at telemetry.Cause) func(*Request) {
		return func(r *Request) {
			r.OnWake = func(c telemetry.Cause) {
				if c == at {
					panic("boom")
				}
			}
		}
	}
	for what, change := range map[string]func(*Request){
		"first backoff": backoff(1), "third backoff": backoff(3), "wake-up": wake(telemetry.Subscribed), "hand-off": wake(telemetry.HandedOver),
	} {
		t.Run(what, func(t *testing.T) {
			run(t, func(w *world) {
				here := what == "hand-off"
				if here {
					w.ask(w.t.Context(), "holder")
					time.Sleep(2 * latency)
				} else {
					w.takeElsewhere()
				}
				req := Request{Key: key, Acquirer: &caller{w: w}}
				change(&req)
				panicked := make(chan any, 1)
				go func() {
					defer func() { panicked <- recover() }()
					_ = w.Acquire(w.t.Context(), &req)
				}()
				synctest.Wait()
				time.Sleep(time.Second)
				if here {
					w.release()
				}
				require.Equal(w.t, "boom", <-panicked)
				next := w.ask(w.t.Context(), "next")
				w.releaseElsewhere()
				time.Sleep(time.Second)
				require.True(w.t, next.has())
				w.release()
			})
		})
	}
}

func TestCloseEndsEveryWait(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		a, b := w.ask(w.t.Context(), "a"), w.ask(w.t.Context(), "b")
		time.Sleep(time.Second)
		w.close()
		require.ErrorIs(t, <-a.done, lock.ErrClosed)
		require.ErrorIs(t, <-b.done, lock.ErrClosed)
	})
}

// The head gets in because its timer fired: the next head sleeps through that,
// and must have a timer all the same.
func TestANewHeadHasATimer(t *testing.T) {
	run(t, func(w *world) {
		w.deaf = true
		w.takeElsewhere()
		head := w.ask(w.t.Context(), "head")
		time.Sleep(2 * latency)
		next := w.ask(w.t.Context(), "next")
		w.releaseElsewhere()
		time.Sleep(safetyPoll + 10*time.Millisecond)
		require.True(t, head.has())
		w.set(func() { w.taken = false }) // forced open elsewhere, and nobody is told
		time.Sleep(safetyPoll + 10*time.Millisecond)
		require.True(t, next.has())
		w.Released(key, head, Release{})
		w.release()
	})
}

// A message that arrives during the attempt that ends yielding is no echo.
func TestAMessageDuringAnAttemptIsNotForgotten(t *testing.T) {
	run(t, func(w *world) {
		first := w.ask(w.t.Context(), "first")
		time.Sleep(2 * latency)
		second := w.ask(w.t.Context(), "second")
		time.Sleep(10 * latency)
		require.True(t, first.has())
		w.with(key, func(e *entry) { e.yield.handOffs = handOffs })
		require.False(t, w.pass())
		w.Released(key, w.holder(), Release{Receivers: 3}) // another process has it at once; the echo is lost
		for w.inFlightNow() == 0 {
			time.Sleep(latency / 100)
		}
		time.Sleep(latency * 3 / 4) // the server has answered
		w.releaseElsewhere()
		time.Sleep(10 * yieldFor)
		require.True(t, second.has())
		w.release()
	})
}

func TestLostHoldsWakeTheQueue(t *testing.T) {
	run(t, func(w *world) {
		first := w.ask(w.t.Context(), "first")
		time.Sleep(2 * latency)
		second := w.ask(w.t.Context(), "second")
		time.Sleep(10 * latency)
		require.True(t, first.has())
		w.set(func() { w.taken = false })
		w.Released(key, w.holder(), Release{}) // its lease was over
		time.Sleep(2 * latency)
		require.True(t, second.has())
		w.release()
	})
}

// Whatever happens, every caller is answered, nobody holds together with
// another, and nothing is left.
func TestManyCallersWithRandomFates(t *testing.T) {
	run(t, func(w *world) {
		var holding int
		var wg sync.WaitGroup
		for range 60 {
			wg.Go(func() {
				for range 30 {
					ctx, cancel := context.WithCancel(w.t.Context())
					if rand.N(3) == 0 {
						time.AfterFunc(rand.N(20*latency), cancel)
					}
					c := &caller{w: w, refuses: rand.N(10) == 0}
					req := Request{Key: key, Acquirer: c}
					if rand.N(3) == 0 {
						req.Deadline = time.Now().Add(rand.N(20 * latency))
					}
					if err := w.Acquire(ctx, &req); err == nil {
						w.set(func() { holding++; assert.Equal(t, 1, holding) })
						time.Sleep(rand.N(3 * latency))
						w.set(func() { holding-- })
						w.release()
					}
					cancel()
					time.Sleep(rand.N(30 * latency))
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
	})
}

package engine

import (
	"context"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// What callers see of the queues is tested with real locks. Here are the moments that no server can be
// made to hit: something happens while an answer is on its way.

const (
	handOffs = turnRounds - 1 // in a turn that is no longer
	patience = 30 * time.Second
	latency  = time.Millisecond
	// slow is a delay for which no caller that leaves waits.
	slow = 2 * session.Grace
)

var key = Key{Kind: "lock", Name: "orders"}

// yard is a server with one key that members of a process ask for, alone or together.
type yard struct {
	*Queues
	t *testing.T

	mu       sync.Mutex
	judge    func(names []string) []Answer // the server's part of an attempt
	reply    time.Duration                 // how long an answer is on its way
	attempts []string                      // the names in each, with commas
	channels map[string]hub.Listener
}

func inYard(t *testing.T, test func(y *yard)) {
	synctest.Test(t, func(t *testing.T) {
		wheel := watchdog.NewWheel(nil)
		defer wheel.Stop()
		y := &yard{t: t, Queues: new(Queues), channels: map[string]hub.Listener{}}
		y.init(Config{
			Open: t.Context(), Wheel: wheel, Turn: time.Nanosecond, Subscribed: func(string) bool { return true }, OnWait: func() {},
			Go: func(f func(context.Context)) bool {
				go f(t.Context())
				return true
			},
			Subscribe: y.subscribe,
			SubscribeOwn: func(channel string, l hub.Listener) (unsubscribe func()) {
				unsubscribe, _ = y.subscribe(channel, l)
				return unsubscribe
			},
		})

		test(y)

		synctest.Wait()
		for i := range y.shards {
			assert.Empty(t, y.shards[i].entries, "entries are left")
			for _, e := range y.shards[i].free {
				assert.Zero(t, e.unregistered, "counted waiters are left")
			}
		}
		assert.Empty(t, y.channels, "subscriptions are left")
	})
}

func (y *yard) subscribe(channel string, l hub.Listener) (func(), bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.channels[channel] = l
	time.AfterFunc(latency, func() { y.publish(channel, hub.Event{Subscribed: true}) })
	return func() {
		y.mu.Lock()
		defer y.mu.Unlock()
		delete(y.channels, channel)
	}, false
}

// publish sends an event to a channel: "all", or "of" and the name of a member.
func (y *yard) publish(channel string, ev hub.Event) {
	y.mu.Lock()
	l := y.channels[channel]
	y.mu.Unlock()
	if l != nil {
		l.Notify(ev)
	}
}

// set changes the server between attempts.
func (y *yard) set(change func()) {
	y.mu.Lock()
	defer y.mu.Unlock()
	change()
}

func (y *yard) replyTakes(d time.Duration) { y.set(func() { y.reply = d }) }

func (y *yard) answers(judge func(names []string) []Answer) { y.set(func() { y.judge = judge }) }

// seen returns the attempts since it was called last.
func (y *yard) seen() (attempts []string) {
	y.set(func() { attempts, y.attempts = y.attempts, nil })
	return attempts
}

// Answers of a server.
func everybody(names []string) []Answer { return same(names, Answer{Acquired: true}) }
func nobody(names []string) []Answer    { return same(names, Answer{FreeIn: -1}) }

func same(names []string, r Answer) []Answer { return slices.Repeat([]Answer{r}, len(names)) }

// first is the answer of a server that has enough for n.
func first(n int) func(names []string) []Answer {
	return func(names []string) []Answer {
		n := min(n, len(names))
		return append(everybody(names[:n]), nobody(names[n:])...)
	}
}

// member is somebody of the process who asks.
type member struct {
	y      *yard
	name   string
	own    bool // it has a channel of its own
	done   chan error
	cancel context.CancelFunc
}

func (m *member) Try(ctx context.Context) (Answer, error) {
	r := m.TryAll(ctx, []Acquirer{m})[0]
	return r, r.Err
}

func (m *member) TryAll(_ context.Context, all []Acquirer) (answers []Answer) {
	names := make([]string, len(all))
	for i, m := range As[*member](all) {
		names[i] = m.name
	}
	time.Sleep(latency)
	var reply time.Duration
	m.y.set(func() {
		m.y.attempts = append(m.y.attempts, strings.Join(names, ","))
		answers, reply = m.y.judge(names), m.y.reply
	})
	time.Sleep(reply)
	return answers
}

func (m *member) Channel() string {
	if m.own {
		return "of " + m.name
	}
	return "all"
}

func (m *member) Abandon()                        { panic("everybody awaits the answer") }
func (m *member) Join(Acquirer) (Relation, error) { panic("there are no owners") }
func (m *member) Describe() session.Hold          { panic("nothing is listed") }
func (m *member) Holds() iter.Seq[session.Hold]   { panic("nothing is listed") }

// ask starts an acquisition.
func (y *yard) ask(name string, change func(*Request)) *member {
	m := &member{y: y, name: name, done: make(chan error, 1)}
	var ctx context.Context
	ctx, m.cancel = context.WithCancel(y.t.Context())
	req := Request{Key: key, Acquirer: m}
	change(&req)
	go func() { m.done <- y.Acquire(ctx, &req) }()
	synctest.Wait()
	return m
}

func exclusive(*Request) {}

// pass passes the key on from a holder to the next waiter.
func (y *yard) pass(from *member) bool {
	return y.Pass(key, from, func(Acquirer) bool { return true })
}

func (y *yard) free(all ...*member) {
	y.t.Helper()
	for _, m := range all {
		y.Released(key, m, Release{})
	}
}

func (y *yard) in(all ...*member) {
	y.t.Helper()
	synctest.Wait()
	for _, m := range all {
		select {
		case err := <-m.done:
			require.NoError(y.t, err, m.name)
		default:
			require.Fail(y.t, m.name+" still waits")
		}
	}
}

func (y *yard) waits(all ...*member) {
	y.t.Helper()
	synctest.Wait()
	for _, m := range all {
		require.Empty(y.t, m.done, m.name)
	}
}

// leaves cancels a call, which must not have acquired.
func (y *yard) leaves(m *member) {
	y.t.Helper()
	m.cancel()
	require.ErrorIs(y.t, <-m.done, lock.ErrNotAcquired)
}

// sole is a server whose key one can have at a time.
type sole struct {
	y      *yard
	taken  bool
	freeIn time.Duration // what a failed attempt is told
	err    error
}

func newSole(y *yard) *sole {
	s := &sole{y: y, freeIn: -1}
	y.answers(s.judge)
	return s
}

func (s *sole) judge(names []string) []Answer {
	if s.err != nil {
		return same(names, Answer{Err: s.err})
	}
	if s.taken {
		return same(names, Answer{FreeIn: s.freeIn})
	}
	s.taken = true
	return first(1)(names)
}

func (s *sole) fails(err error) { s.y.set(func() { s.err = err }) }

// opens frees the key, and tells nobody.
func (s *sole) opens() { s.y.set(func() { s.taken = false }) }

// release releases the key for all.
func (s *sole) release(from Acquirer) {
	s.opens()
	s.y.publish("all", hub.Event{Payload: "0"})
	s.y.Released(key, from, Release{Receivers: -1})
}

// The head gets in because its timer fired: the next head sleeps through that, and must have a timer
// all the same.
func TestANewHeadHasATimer(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		s.taken = true
		head, next := y.ask("head", exclusive), y.ask("next", exclusive)
		time.Sleep(10 * latency)

		s.opens()
		time.Sleep(safetyPoll + 10*time.Millisecond)
		y.in(head)

		s.opens() // forced open elsewhere
		time.Sleep(safetyPoll + 10*time.Millisecond)
		y.in(next)

		y.free(head)
		s.release(next)
	})
}

// A message that arrives during the attempt that ends the time of the others is no echo.
func TestAMessageDuringAnAttemptIsNotForgotten(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		var all []*member
		for range handOffs + 2 {
			all = append(all, y.ask("member", exclusive))
			time.Sleep(10 * latency)
		}
		for _, m := range all[:handOffs] {
			y.in(m)
			require.True(t, y.pass(m))
		}
		holder, waiter := all[handOffs], all[handOffs+1]
		y.in(holder)
		require.False(t, y.pass(holder), "others have their turn")

		y.seen()
		y.replyTakes(latency)
		y.Released(key, holder, Release{Receivers: 3}) // another process has it at once; the echo is lost
		for len(y.seen()) == 0 {
			time.Sleep(latency / 100)
		}
		s.opens()
		y.publish("all", hub.Event{Payload: "0"})
		time.Sleep(10 * mostPause)

		y.in(waiter)
		s.release(waiter)
	})
}

func TestAWaiterRidesOutAnOutage(t *testing.T) {
	const outage = patience / 2
	inYard(t, func(y *yard) {
		s := newSole(y)
		s.taken, s.freeIn = true, time.Second
		m := y.ask("waiter", exclusive)
		time.Sleep(10 * latency)

		y.seen()
		s.fails(&Unavailable{io.EOF})
		time.Sleep(outage)
		tries := len(y.seen())
		require.Greater(t, tries, int(outage/maxRetry)-2, "asleep")
		require.Less(t, tries, int(outage/minRetry), "hot")

		s.fails(nil)
		s.opens()
		require.NoError(t, <-m.done)
		s.release(m)
	})
}

// Requests that are sent without a reply, and that are not sent.
var (
	noReply = &Unavailable{errors.Join(lock.ErrIndeterminate, io.EOF)}
	notSent = &Unavailable{errors.Join(lock.ErrUnavailable, io.ErrClosedPipe)}
)

// Only the head makes attempts, and all leave at the same time.
func TestAnOutageIsThatOfEveryWaiter(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		s.taken, s.freeIn = true, 10*time.Millisecond
		deadline := time.Now().Add(time.Second)
		var all []*member
		for range 3 {
			all = append(all, y.ask("member", func(r *Request) { r.Deadline = deadline }))
			time.Sleep(latency)
		}

		s.fails(noReply)

		for i, m := range all {
			err := <-m.done
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Equal(t, i == 0, errors.Is(err, lock.ErrIndeterminate), "only the head has sent requests: %v", err)
			require.Equal(t, i != 0, errors.Is(err, lock.ErrUnavailable), "%v", err)
		}
	})
}

// A caller whose first attempt has no answer waits for the server, and others behind it. One that does not wait for a
// server fails at once, wherever it is.
func TestAWaitIsForTheServerToo(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		failFast := func(r *Request) { r.FailFast = true }
		fails := func(m *member) {
			t.Helper()
			began := time.Now()
			require.ErrorIs(t, <-m.done, lock.ErrUnavailable)
			require.LessOrEqual(t, time.Since(began), 2*latency)
		}

		s.fails(notSent)
		fails(y.ask("alone", failFast))

		first := y.ask("first", func(*Request) {})
		time.Sleep(2 * latency)
		second := y.ask("second", func(*Request) {})
		fails(y.ask("behind", failFast))
		time.Sleep(2 * patience)
		s.fails(nil)
		require.NoError(t, <-first.done)

		third := y.ask("third", failFast)
		time.Sleep(2 * latency)
		s.fails(notSent)
		s.release(first)
		fails(third)
		s.fails(nil)
		require.NoError(t, <-second.done)
		s.release(second)
	})
}

// A connection that was lost while it was idle costs an attempt, and no pause.
func TestALostConnectionCostsAnAttempt(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		s.fails(noReply)
		m := y.ask("alone", exclusive)
		time.Sleep(latency + latency/2)
		s.fails(nil)
		time.Sleep(10 * latency)
		y.in(m)
		s.release(m)
	})
}

// An attempt has no reply, and those that follow are not sent.
func TestAnUnknownOutcomeIsNotForgotten(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		s.taken, s.freeIn = true, 10*time.Millisecond
		ask := func() *member {
			return y.ask("waiter", func(r *Request) { r.Deadline = time.Now().Add(5 * time.Second) })
		}
		m := ask()
		time.Sleep(5 * latency)
		s.fails(noReply)
		time.Sleep(2 * time.Second)
		s.fails(notSent)
		require.ErrorIs(t, <-m.done, lock.ErrIndeterminate)
		require.ErrorIs(t, <-ask().done, lock.ErrUnavailable, "nothing was sent")

		// An answer ends it.
		s.fails(nil)
		m = ask()
		time.Sleep(5 * latency)
		s.fails(noReply)
		time.Sleep(time.Second)
		s.fails(nil)
		err := <-m.done
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
	})
}

// hasty is a member whose attempts fail if its call has ended.
type hasty struct {
	*member
	s      *sole
	trying *atomic.Int32
}

func (h *hasty) Try(ctx context.Context) (Answer, error) {
	assert.EqualValues(h.y.t, 1, h.trying.Add(1), "attempts of one key at once")
	defer h.trying.Add(-1)
	a, err := h.member.Try(ctx)
	if ctx.Err() == nil {
		return a, err
	}
	if a.Acquired {
		h.s.opens()
		h.y.publish("all", hub.Event{Payload: "0"})
	}
	return Answer{}, &Unavailable{ctx.Err()}
}

// Whatever happens, every caller is answered, nobody holds together with another, and nothing is left.
func TestManyCallersWithRandomFates(t *testing.T) {
	inYard(t, func(y *yard) {
		s := newSole(y)
		var trying, holding atomic.Int32
		var callers sync.WaitGroup
		for range 60 {
			callers.Go(func() {
				for range 30 {
					ctx, cancel := context.WithCancel(y.t.Context())
					if rand.N(3) == 0 {
						time.AfterFunc(rand.N(20*latency), cancel)
					}
					h := &hasty{&member{y: y, name: "caller"}, s, &trying}
					req := Request{Key: key, Acquirer: h}
					if rand.N(3) == 0 {
						req.Deadline = time.Now().Add(rand.N(20 * latency))
					}
					if y.Acquire(ctx, &req) == nil {
						assert.EqualValues(t, 1, holding.Add(1))
						time.Sleep(rand.N(3 * latency))
						holding.Add(-1)
						if !y.Pass(key, h, func(Acquirer) bool { return rand.N(10) > 0 }) {
							time.Sleep(latency)
							s.release(h)
						}
					}
					cancel()
					time.Sleep(rand.N(30 * latency))
				}
			})
		}
		callers.Wait()
		time.Sleep(time.Minute)
	})
}

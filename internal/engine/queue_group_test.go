package engine

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// yard is a server with one key that members of a process ask for, alone or
// together.
type yard struct {
	*Queues
	t *testing.T

	mu        sync.Mutex
	judge     func(names []string) []Answer // the server's part of an attempt
	delay     time.Duration                 // of attempts, beyond latency
	reply     time.Duration                 // how long an answer is on its way
	attempts  []string                      // the names in each, with commas
	abandoned []string
	channels  map[string]pubsub.Listener
	members   map[string]*member // the latest of each name
}

func inYard(t *testing.T, test func(y *yard)) {
	synctest.Test(t, func(t *testing.T) {
		wheel := watchdog.NewWheel(nil)
		defer wheel.Stop()
		y := &yard{t: t, channels: map[string]pubsub.Listener{}, members: map[string]*member{}}
		y.Queues = newQueues(Config{Open: t.Context(), Wheel: wheel, HandOffs: handOffs, MaxOutage: patience, Go: background(t), OnWait: func() {},
			Subscribe: y.subscribe,
			SubscribeOwn: func(channel string, l pubsub.Listener) (unsubscribe func()) {
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

func (y *yard) subscribe(channel string, l pubsub.Listener) (func(), bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.channels[channel] = l
	time.AfterFunc(latency, func() { y.publish(channel, pubsub.Event{Subscribed: true}) })
	return func() {
		y.mu.Lock()
		defer y.mu.Unlock()
		delete(y.channels, channel)
	}, false
}

// publish sends an event to a channel: "all", or "of" and the name of a member.
func (y *yard) publish(channel string, ev pubsub.Event) {
	y.mu.Lock()
	l := y.channels[channel]
	y.mu.Unlock()
	if l != nil {
		l.Notify(ev)
	}
}

func (y *yard) replyTakes(d time.Duration) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.reply = d
}

func (y *yard) answers(judge func(names []string) []Answer) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.judge = judge
}

// seen returns the attempts since it was called last.
func (y *yard) seen() []string {
	y.mu.Lock()
	defer y.mu.Unlock()
	seen := y.attempts
	y.attempts = nil
	return seen
}

// subscribed returns the own channels of members that are subscribed.
func (y *yard) subscribed() (channels []string) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for name, m := range y.members {
		if y.channels[m.Channel()] != nil {
			channels = append(channels, "of "+name)
		}
	}
	slices.Sort(channels)
	return channels
}

// Answers of a server.
func everybody(names []string) []Answer { return same(names, Answer{Acquired: true}) }
func nobody(names []string) []Answer    { return same(names, Answer{FreeIn: -1}) }

func same(names []string, r Answer) []Answer {
	results := make([]Answer, len(names))
	for i := range results {
		results[i] = r
	}
	return results
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

func (m *member) TryAll(_ context.Context, all []Acquirer) []Answer {
	names := make([]string, len(all))
	for i, m := range As[*member](all) {
		names[i] = m.name
	}
	time.Sleep(latency + m.y.delay)
	m.y.mu.Lock()
	m.y.attempts = append(m.y.attempts, strings.Join(names, ","))
	results, reply := m.y.judge(names), m.y.reply
	m.y.mu.Unlock()
	time.Sleep(reply)
	return results
}

func (m *member) Join(Acquirer) (Relation, error) { panic("there are no owners") }

func (m *member) Describe() session.Hold { panic("nothing is listed") }

func (m *member) Holds() iter.Seq[session.Hold] { panic("nothing is listed") }

func (m *member) Channel() string {
	if m.own {
		return "of " + m.name
	}
	return "all"
}

func (m *member) Abandon() {
	m.y.mu.Lock()
	defer m.y.mu.Unlock()
	m.y.abandoned = append(m.y.abandoned, m.name)
}

func (y *yard) ask(name string, change func(*Request)) *member {
	m := &member{y: y, name: name, done: make(chan error, 1)}
	var ctx context.Context
	ctx, m.cancel = context.WithCancel(y.t.Context())
	req := Request{Key: key, Acquirer: m}
	change(&req)
	y.mu.Lock()
	y.members[name] = m
	y.mu.Unlock()
	go func() { m.done <- y.Acquire(ctx, &req) }()
	synctest.Wait()
	return m
}

func reader(r *Request) { r.Shareable, r.Shared, r.Group = true, true, true }
func writer(r *Request) { r.Shareable = true }
func inLine(r *Request) {
	r.Ordered, r.Group, r.Acquirer.(*member).own = true, true, true
}

// pass passes the key on from a holder to the next waiter.
func (y *yard) pass(from *member) bool {
	return y.Pass(key, from, func(Acquirer) bool { return true })
}

func (y *yard) readers(names ...string) (all []*member) {
	for _, name := range names {
		all = append(all, y.ask(name, reader))
	}
	return all
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

func TestThoseWhoWaitBehindOneAnotherTryTogether(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		all := y.readers("a", "b", "c")
		time.Sleep(10 * latency) // a has tried, and again when it was subscribed
		w := y.ask("w", writer)
		d := y.ask("d", reader)
		y.waits(append(all, w, d)...)
		y.seen()

		y.answers(func(names []string) []Answer {
			if names[0] == "w" {
				return nobody(names)
			}
			return everybody(names)
		})
		y.publish("all", pubsub.Event{})
		time.Sleep(10 * latency)
		y.in(all...)
		y.waits(w, d) // d came after a writer
		require.Equal(t, []string{"a,b,c", "w"}, y.seen())

		y.free(all[0])
		y.answers(everybody)
		y.free(all[1:]...)
		time.Sleep(10 * latency)
		y.in(w)
		y.answers(everybody)
		y.free(w)
		time.Sleep(10 * latency)
		y.in(d)
		y.free(d)
	})
}

func TestAReaderGetsInBesideAReaderOfItsProcess(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(everybody)
		a := y.ask("a", reader)
		time.Sleep(2 * latency)
		b := y.ask("b", reader)
		time.Sleep(latency + latency/2) // it does not subscribe before
		y.in(a, b)
		require.Equal(t, []string{"a", "b"}, y.seen())
		y.free(a, b)
	})
}

func TestAnAttemptForManyHasALimit(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		var all []*member
		for range 2*maxGroup + 1 {
			all = append(all, y.ask("r", reader))
		}
		time.Sleep(10 * latency)
		y.seen()
		y.answers(everybody)
		y.publish("all", pubsub.Event{})
		time.Sleep(10 * latency)
		y.in(all...)
		seen := y.seen()
		require.Len(t, seen, 3)
		require.Equal(t, maxGroup, strings.Count(seen[0], "r"))
		y.free(all...)
	})
}

// slow is a delay for which no caller that leaves waits.
const slow = 2 * session.Grace

// left fails the test unless m has left soon, without an answer.
func (y *yard) left(m *member) {
	y.t.Helper()
	time.Sleep(session.Grace)
	synctest.Wait()
	require.NotEmpty(y.t, m.done)
	err := <-m.done
	require.ErrorIs(y.t, err, lock.ErrNotAcquired)
	require.ErrorIs(y.t, wire.Undone(y.t.Context(), err), lock.ErrIndeterminate, "Abandon is yet to come")
}

func TestACallerThatLeavesAwaitsTheAnswerOfAnAttemptForAMoment(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		all := y.readers("a", "b", "c")
		time.Sleep(10 * latency)
		y.answers(func(names []string) []Answer {
			results := nobody(names)
			results[0].Acquired = names[0] == "a"
			return results
		})
		y.publish("all", pubsub.Event{})
		time.Sleep(latency / 2) // the attempt is under way
		all[0].cancel()
		all[1].cancel()
		time.Sleep(latency)
		synctest.Wait()
		y.in(all[0]) // which gives it back
		err := <-all[1].done
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		require.Empty(t, y.abandoned)
		all[2].cancel()
		<-all[2].done
		y.free(all[0])
	})
}

func TestWhoLeavesDuringTheAttemptOfAnotherIsGivenBack(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		all := y.readers("a", "b", "c")
		time.Sleep(10 * latency)
		y.answers(everybody)
		y.delay = slow
		y.publish("all", pubsub.Event{})
		time.Sleep(latency / 2) // the attempt is under way
		all[1].cancel()
		y.left(all[1])
		time.Sleep(slow)
		y.in(all[0], all[2])
		require.Equal(t, []string{"b"}, y.abandoned)
		y.free(all[0], all[2])
	})
}

func TestAnErrorIsForAllWhoTriedTogether(t *testing.T) {
	errBoom := errors.New("boom")
	inYard(t, func(y *yard) {
		y.answers(nobody)
		all := y.readers("a", "b")
		time.Sleep(10 * latency)
		y.answers(func(names []string) []Answer { return same(names, Answer{Err: &Unavailable{errBoom}}) })
		y.publish("all", pubsub.Event{})
		time.Sleep(10 * latency)
		y.waits(all...)
		all[1].cancel()
		err := <-all[1].done
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, errBoom)
		all[1] = y.ask("c", reader)

		y.answers(func(names []string) []Answer { return same(names, Answer{Err: errBoom}) })
		time.Sleep(2 * maxRetry)
		for _, m := range all {
			require.Equal(t, errBoom, <-m.done, m.name)
		}
	})
}

// line is a server that keeps waiters in order.
type line struct {
	y      *yard
	holder string
	names  []string
}

func newLine(y *yard) *line {
	l := &line{y: y, holder: "elsewhere"}
	y.answers(l.judge)
	return l
}

func (l *line) order() []string {
	l.y.mu.Lock()
	defer l.y.mu.Unlock()
	return slices.Clone(l.names)
}

// becomes sets who holds and, if names are given, who waits.
func (l *line) becomes(holder string, names ...string) {
	l.y.mu.Lock()
	defer l.y.mu.Unlock()
	l.holder = holder
	if names != nil {
		l.names = names
	}
}

func (l *line) judge(names []string) []Answer {
	results := make([]Answer, len(names))
	for i, name := range names {
		at := -1
		for j, n := range l.names {
			if n == name {
				at = j
			}
		}
		switch {
		case l.holder == "" && (at == 0 || len(l.names) == 0):
			l.holder = name
			if at == 0 {
				l.names = l.names[1:]
			}
			results[i].Acquired = true
		case at < 0:
			l.names = append(l.names, name)
			results[i].Requeued = true
			fallthrough
		default:
			results[i].FreeIn = -1
		}
	}
	return results
}

func TestEveryWaiterGetsItsPlaceWhenItComes(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		var all []*member
		for _, name := range []string{"a", "b", "c", "d"} {
			all = append(all, y.ask(name, inLine))
		}
		time.Sleep(5 * latency)
		require.Equal(t, []string{"a", "b", "c", "d"}, l.order())
		require.Equal(t, []string{"a", "b,c,d", "a"}, y.seen(), "those who came together try together")
		require.Equal(t, []string{"of a"}, y.subscribed(), "only the first of this process can be told")

		all[1].cancel()
		require.ErrorIs(t, <-all[1].done, lock.ErrNotAcquired)
		l.becomes("", "a", "c", "d")
		y.publish("of a", pubsub.Event{})
		time.Sleep(5 * latency)
		y.in(all[0])
		require.Empty(t, y.subscribed(), "nobody needs to be told while this process holds")
		require.Equal(t, []string{"a"}, y.seen())

		// The server prefers somebody elsewhere: the next one here listens.
		l.becomes("elsewhere")
		y.Released(key, all[0], Release{Receivers: 1, elsewhere: true})
		time.Sleep(5 * latency)
		require.Equal(t, []string{"of c"}, y.subscribed())
		require.Equal(t, []string{"c"}, y.seen())

		l.becomes("")
		y.publish("of c", pubsub.Event{})
		time.Sleep(5 * latency)
		y.in(all[2])
		require.True(t, y.pass(all[2]))
		y.in(all[3])
		y.free(all[3])
	})
}

func TestAWaiterWhoLostItsPlaceQueuesAnew(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a, b, c := y.ask("a", inLine), y.ask("b", inLine), y.ask("c", inLine)
		time.Sleep(5 * latency)
		y.seen()

		y.Displaced(key, b)
		time.Sleep(5 * latency)
		require.Equal(t, []string{"b"}, y.seen())
		require.Equal(t, []string{"a", "b", "c"}, l.order())

		l.becomes("elsewhere", "b", "c")
		y.Displaced(key, a)
		time.Sleep(5 * latency)
		require.Equal(t, []string{"b", "c", "a"}, l.order())
		require.Equal(t, []string{"of a", "of b"}, y.subscribed(), "b is the first now, and a will be")
		y.publish("of b", pubsub.Event{})
		time.Sleep(5 * latency)
		y.seen()
		l.becomes("")
		for _, m := range []*member{b, c, a} {
			y.publish("of "+m.name, pubsub.Event{})
			time.Sleep(5 * latency)
			y.in(m)
			l.becomes("")
			y.free(m)
			time.Sleep(5 * latency)
		}
	})
}

func TestWhoGotNoPlaceInAnOutageTriesAgain(t *testing.T) {
	errBoom := errors.New("boom")
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.ask("a", inLine)
		time.Sleep(5 * latency)
		y.answers(func(names []string) []Answer { return same(names, Answer{Err: &Unavailable{errBoom}}) })
		b := y.ask("b", func(r *Request) { inLine(r); r.Group = false })
		c := y.ask("c", inLine)
		time.Sleep(5 * latency)
		y.waits(a, b, c)
		y.seen()
		y.answers(l.judge)
		time.Sleep(2 * maxRetry)
		require.ElementsMatch(t, []string{"a", "b", "c"}, l.order())
		b.cancel()
		c.cancel()
		<-b.done
		<-c.done
		l.becomes("", "a")
		y.publish("of a", pubsub.Event{})
		time.Sleep(5 * latency)
		y.in(a)
		y.free(a)
	})
}

func TestAPlaceBeingTakenDoesNotDelayTheHandOff(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.ask("a", inLine)
		time.Sleep(5 * latency)
		l.becomes("")
		y.publish("of a", pubsub.Event{})
		time.Sleep(5 * latency)
		y.in(a)
		b := y.ask("b", inLine)
		time.Sleep(5 * latency)
		c := y.ask("c", inLine)
		require.True(t, y.pass(a), "while c tries")
		l.becomes("b")
		y.in(b)
		require.False(t, y.pass(b), "c is not in the server's queue")
		time.Sleep(5 * latency)
		require.True(t, y.pass(b))
		y.in(c)
		y.free(c)
	})
}

func TestTheOthersGoOnWhenWhoTriesForThemLeaves(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		all := y.readers("a", "b", "c")
		time.Sleep(10 * latency)
		y.answers(everybody)
		y.delay = slow
		y.publish("all", pubsub.Event{})
		time.Sleep(latency / 2) // the attempt is under way
		all[0].cancel()
		y.left(all[0])
		y.waits(all[1:]...)
		time.Sleep(slow)
		y.in(all[1:]...)
		require.Equal(t, []string{"a"}, y.abandoned)
		y.free(all[1:]...)
	})
}

func TestTheNextWithoutAPlaceTriesWhenTheFirstLeaves(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		first := y.ask("first", inLine)
		time.Sleep(10 * latency)
		alone := y.ask("alone", func(r *Request) { inLine(r); r.Group = false })
		// It is over when the attempt under way is, and this one would be the next to try.
		leaver := y.ask("leaver", func(r *Request) { inLine(r); r.Deadline = time.Now().Add(latency) })
		last := y.ask("last", inLine)
		y.seen()
		time.Sleep(10 * latency)
		require.ErrorIs(t, <-leaver.done, lock.ErrNotAcquired)
		seen := y.seen()
		require.Contains(t, seen[len(seen)-1], "last")
		for _, m := range []*member{first, alone, last} {
			m.cancel()
			require.ErrorIs(t, <-m.done, lock.ErrNotAcquired)
		}
	})
}

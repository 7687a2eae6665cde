package engine

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/lock"
)

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

// becomes sets who holds and, if names are given, who waits.
func (l *line) becomes(holder string, names ...string) {
	l.y.set(func() {
		l.holder = holder
		if names != nil {
			l.names = names
		}
	})
}

func (l *line) order() (names []string) {
	l.y.set(func() { names = slices.Clone(l.names) })
	return names
}

func (l *line) judge(names []string) []Answer {
	answers := nobody(names)
	for i, name := range names {
		at := slices.Index(l.names, name)
		if l.holder == "" && (at == 0 || len(l.names) == 0) {
			l.holder = name
			l.names = l.names[at+1:]
			answers[i].Acquired = true
		} else if at < 0 {
			l.names = append(l.names, name)
			answers[i].Requeued = true
		}
	}
	return answers
}

func inLine(r *Request) { r.Ordered, r.Group, r.Acquirer.(*member).own = true, true, true }
func alone(r *Request)  { r.Ordered, r.Acquirer.(*member).own = true, true }

// subscribed returns the channels that are subscribed, sorted.
func (y *yard) subscribed() (channels []string) {
	y.set(func() {
		for channel := range y.channels {
			channels = append(channels, channel)
		}
	})
	slices.Sort(channels)
	return channels
}

// waitsIn has a member wait for a key that another process holds.
func (y *yard) waitsIn(l *line, name string) *member {
	y.t.Helper()
	l.becomes("elsewhere")
	m := y.ask(name, inLine)
	time.Sleep(5 * latency)
	y.waits(m)
	return m
}

// served has a member acquire the key, and release it.
func (y *yard) served(l *line, m *member) {
	y.t.Helper()
	l.becomes("", m.name)
	y.publish(m.Channel(), hub.Event{})
	time.Sleep(5 * latency)
	y.in(m)
	y.free(m)
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

		y.leaves(all[1])
		l.becomes("", "a", "c", "d")
		y.publish("of a", hub.Event{})
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
		y.publish("of c", hub.Event{})
		time.Sleep(5 * latency)
		y.in(all[2])
		require.True(t, y.pass(all[2]))
		y.in(all[3])
		y.free(all[3])
	})
}

func TestAPlaceBeingTakenDoesNotDelayTheHandOff(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.waitsIn(l, "a")
		l.becomes("")
		y.publish("of a", hub.Event{})
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

func TestTheNextWithoutAPlaceTriesWhenTheFirstLeaves(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		all := []*member{y.ask("first", inLine)}
		time.Sleep(10 * latency)
		all = append(all, y.ask("alone", alone))
		// It is over when the attempt under way is, and this one would be the next to try.
		leaver := y.ask("leaver", func(r *Request) { inLine(r); r.Deadline = time.Now().Add(latency) })
		all = append(all, y.ask("last", inLine))
		y.seen()

		time.Sleep(10 * latency)

		require.ErrorIs(t, <-leaver.done, lock.ErrNotAcquired)
		seen := y.seen()
		require.Contains(t, seen[len(seen)-1], "last")
		for _, m := range all {
			y.leaves(m)
		}
	})
}

func TestWhoGotNoPlaceInAnOutageTriesAgain(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		all := []*member{y.waitsIn(l, "a")}
		y.answers(func(names []string) []Answer { return same(names, Answer{Err: notSent}) })
		all = append(all, y.ask("b", alone), y.ask("c", inLine))
		y.seen()
		time.Sleep(minRetry - latency)
		y.waits(all...)
		require.Equal(t, []string{"b"}, y.seen(), "the others pause, too")

		y.answers(l.judge)
		time.Sleep(2 * maxRetry)
		require.ElementsMatch(t, []string{"a", "b", "c"}, l.order())
		for _, m := range all {
			y.leaves(m)
		}
	})
}

// A message may come while its waiter makes an attempt, which may have been too early for it. So may a
// heartbeat that finds that a waiter is the first, or has lost its position.
func TestAMessageDuringAnAttempt(t *testing.T) {
	for what, comes := range map[string]func(y *yard, m *member){
		"message":   func(y *yard, m *member) { y.publish("of "+m.name, hub.Event{}) },
		"heartbeat": func(y *yard, m *member) { y.Displaced(key, m) },
	} {
		for _, names := range [][]string{{"a"}, {"a", "b"}} {
			inYard(t, func(y *yard) {
				l := newLine(y)
				var all []*member
				for _, name := range names {
					all = append(all, y.waitsIn(l, name))
				}
				l.becomes("elsewhere", names...)
				y.seen()

				y.replyTakes(slow)
				for _, m := range all {
					y.Displaced(key, m)
				}
				time.Sleep(slow / 2)
				l.becomes("", names...)
				comes(y, all[0])
				y.replyTakes(0)
				time.Sleep(slow)

				y.in(all[0])
				require.Len(t, y.seen(), 2, what)
				y.free(all[0])
				for _, m := range all[1:] {
					y.served(l, m)
				}
			})
		}
	}
}

// A waiter that was the first may hear that it is next when another one is before it: the server may
// have another order by then.
func TestAMessageForALaterWaiter(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a, b := y.waitsIn(l, "a"), y.waitsIn(l, "b")
		l.becomes("elsewhere", "b")
		y.Displaced(key, a) // and goes behind b
		time.Sleep(5 * latency)
		require.Equal(t, []string{"of a", "of b"}, y.subscribed())

		l.becomes("", "a", "b")
		y.publish("of a", hub.Event{})
		time.Sleep(5 * latency)

		y.in(a)
		y.free(a)
		y.served(l, b)
	})
}

// An event that is late, for a wait that is over, is for nobody.
func TestALateEventOfAWaiter(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.waitsIn(l, "a")
		var late hub.Listener
		y.set(func() { late = y.channels["of a"] })
		y.served(l, a)
		b := y.waitsIn(l, "b")
		y.seen()
		late.Notify(hub.Event{})
		time.Sleep(5 * latency)
		require.Empty(t, y.seen())
		y.served(l, b)
	})
}

package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/pubsub"
)

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
	y.publish(m.Channel(), pubsub.Event{})
	time.Sleep(5 * latency)
	y.in(m)
	y.free(m)
}

// The first waiter of a process listens to its own channel. It makes an attempt when it is subscribed,
// because a message may be lost before, and another one when it hears that it is next.
func TestTheFirstWaiterListens(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		for range 2 {
			a := y.waitsIn(l, "a")
			require.Equal(t, []string{"of a"}, y.subscribed())
			require.Equal(t, []string{"a", "a"}, y.seen())
			y.served(l, a)
			require.Equal(t, []string{"a"}, y.seen())
			require.Empty(t, y.subscribed())
		}
	})
}

// A message may come while its waiter makes an attempt, which may have been too early for it.
func TestAMessageDuringAnAttempt(t *testing.T) {
	for _, others := range [][]string{nil, {"b"}} {
		t.Run(fmt.Sprint("of a and ", others), func(t *testing.T) {
			inYard(t, func(y *yard) {
				l := newLine(y)
				a := y.waitsIn(l, "a")
				all := []*member{a}
				for _, name := range others {
					all = append(all, y.waitsIn(l, name))
				}
				l.becomes("elsewhere", "a", "b")
				y.seen()
				y.replyTakes(slow)
				for _, m := range all {
					y.Displaced(key, m)
				}
				time.Sleep(slow / 2)
				l.becomes("", "a", "b")
				y.publish("of a", pubsub.Event{})
				y.replyTakes(0)
				time.Sleep(slow)
				y.in(a)
				require.Len(t, y.seen(), 2)
				y.free(a)
				for _, m := range all[1:] {
					y.served(l, m)
				}
			})
		})
	}
}

// A message that was in vain costs one further attempt.
func TestAMessageInVain(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.waitsIn(l, "a")
		y.seen()
		y.replyTakes(slow)
		y.Displaced(key, a)
		time.Sleep(slow / 2)
		y.publish("of a", pubsub.Event{})
		y.replyTakes(0)
		time.Sleep(slow)
		require.Equal(t, []string{"a", "a"}, y.seen())
		y.served(l, a)
	})
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
		y.publish("of a", pubsub.Event{})
		time.Sleep(5 * latency)
		y.in(a)
		y.free(a)
		y.served(l, b)
	})
}

// A heartbeat may find that a waiter is the first, or has lost its position, while the reply of an
// attempt is on its way. The waiter tries again then, and does not wait for the next heartbeat.
func TestAHeartbeatDuringAnAttempt(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a, b := y.waitsIn(l, "a"), y.waitsIn(l, "b")
		y.seen()
		y.replyTakes(slow)
		y.Displaced(key, b)
		time.Sleep(slow / 2)
		l.becomes("", "b", "a")
		y.Displaced(key, b)
		y.replyTakes(0)
		time.Sleep(slow)
		y.in(b)
		require.Equal(t, []string{"b", "b"}, y.seen())
		y.free(b)
		y.served(l, a)
	})
}

// An event that is late, for a wait that is over, is for nobody.
func TestALateEventOfAWaiter(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.waitsIn(l, "a")
		late := y.channels["of a"]
		y.served(l, a)
		b := y.waitsIn(l, "b")
		y.seen()
		late.Notify(pubsub.Event{})
		time.Sleep(5 * latency)
		require.Empty(t, y.seen())
		y.served(l, b)
	})
}

// A lost connection may have lost messages: a waiter whose channel is subscribed again makes an attempt.
func TestAWaiterTriesAgainWhenItsChannelIsSubscribedAgain(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		a := y.waitsIn(l, "a")
		y.seen()
		y.publish("of a", pubsub.Event{Subscribed: true})
		time.Sleep(5 * latency)
		require.Equal(t, []string{"a"}, y.seen())
		y.served(l, a)
	})
}

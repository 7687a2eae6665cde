package acquire

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// reserved returns the number of channels that are subscribed for later waiters.
func (y *yard) reserved() int {
	channels := len(y.subscribed())
	y.mu.Lock()
	defer y.mu.Unlock()
	return len(y.channels) - channels
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
	y.publish("of "+m.name, pubsub.Event{})
	time.Sleep(5 * latency)
	y.in(m)
	y.free(m)
}

// contended has two waits in succession, after which there are reserved ids.
func (y *yard) contended(l *line) {
	y.t.Helper()
	for _, name := range []string{"first", "second"} {
		y.seen()
		m := y.waitsIn(l, name)
		require.Equal(y.t, []string{name, name}, y.seen(), "it tries again when it is subscribed")
		y.served(l, m)
	}
	require.Equal(y.t, reserveSize, y.reserved())
	y.seen()
}

// The first wait for a key reserves nothing. From the second one on, channels are subscribed before
// there are waiters for them, several in one request, and these waiters try once before the
// message.
func TestReservedChannelsSpareAttempts(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.served(l, y.waitsIn(l, "first"))
		require.Zero(t, y.reserved(), "the key may not be used again")
		y.served(l, y.waitsIn(l, "second"))
		require.Equal(t, reserveSize, y.reserved())
		y.seen()
		before := y.subscriptions
		for i := range 10 * reserveSize {
			name := fmt.Sprint("waiter ", i)
			m := y.waitsIn(l, name)
			require.Equal(t, []string{name}, y.seen())
			y.served(l, m)
			require.Equal(t, []string{name}, y.seen())
		}
		require.Equal(t, 10, y.subscriptions-before)
	})
}

// A key that is free costs nothing, though some of its ids are reserved.
func TestNothingIsReservedWithoutAWait(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		before := y.subscriptions
		for range 2 * reserveSize {
			l.becomes("")
			m := y.ask("quick", inLine)
			time.Sleep(2 * latency)
			y.in(m)
			y.free(m)
		}
		require.Equal(t, before, y.subscriptions)
		require.Zero(t, y.reserved())
	})
}

func TestReservedChannelsAreGivenBack(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		time.Sleep(pubsub.DefaultKeepWarm - time.Second)
		require.Equal(t, reserveSize, y.reserved())
		l.becomes("")
		holder := y.ask("holder", inLine)
		time.Sleep(10 * pubsub.DefaultKeepWarm)
		y.in(holder)
		require.Equal(t, reserveSize-1, y.reserved(), "the process still uses the key")
		y.free(holder)
		for range 4 {
			time.Sleep(pubsub.DefaultKeepWarm - time.Second)
			y.served(l, y.waitsIn(l, "now and then"))
			require.NotZero(t, y.reserved())
		}
		time.Sleep(2 * pubsub.DefaultKeepWarm)
		require.Zero(t, y.reserved())
	})
}

// A message for a waiter with a reserved id is for that waiter, whatever it is doing.
func TestMessagesOfReservedChannels(t *testing.T) {
	for _, c := range []struct {
		name   string
		during func(y *yard, l *line) // the message comes for b
		seen   []string
	}{
		{"during the first attempt", func(y *yard, l *line) {
			l.becomes("elsewhere")
			y.replyTakes(slow)
			y.ask("b", inLine)
			time.Sleep(slow / 2)
			l.becomes("", "b")
			y.publish("of b", pubsub.Event{})
		}, []string{"b", "b"}},
		{"while another waits before it", func(y *yard, l *line) {
			y.waitsIn(l, "a")
			y.waitsIn(l, "b")
			l.becomes("", "b", "a")
			y.publish("of b", pubsub.Event{})
		}, []string{"a", "b", "b"}},
		{"during an attempt for both", func(y *yard, l *line) {
			a := y.waitsIn(l, "a")
			b := y.waitsIn(l, "b")
			l.becomes("elsewhere", "a", "b")
			y.replyTakes(slow)
			y.Displaced(key, a)
			y.Displaced(key, b)
			time.Sleep(slow / 2)
			l.becomes("", "b", "a")
			y.publish("of b", pubsub.Event{})
		}, []string{"a", "b", "a,b", "b"}},
		{"before the reply of its attempt, while another arrives", func(y *yard, l *line) {
			l.becomes("")
			holder := y.ask("holder", inLine)
			time.Sleep(5 * latency)
			y.in(holder)
			y.replyTakes(slow)
			y.ask("b", inLine)
			time.Sleep(slow / 2)
			y.ask("a", inLine) // with the reply, b goes behind it
			l.becomes("", "b")
			y.publish("of b", pubsub.Event{})
			y.Released(key, holder, Release{Receivers: 1, Elsewhere: true})
		}, []string{"holder", "b", "a,b"}},
		{"before the reply of the first attempt, while another arrives", func(y *yard, l *line) {
			l.becomes("elsewhere")
			y.replyTakes(slow)
			y.ask("b", inLine)
			time.Sleep(slow / 2)
			y.ask("a", inLine)
			l.becomes("", "b")
			y.publish("of b", pubsub.Event{})
		}, []string{"b", "b,a"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inYard(t, func(y *yard) {
				l := newLine(y)
				y.contended(l)
				c.during(y, l)
				y.replyTakes(0)
				time.Sleep(slow)
				b := y.members["b"]
				y.in(b)
				require.Equal(t, c.seen, y.seen())
				y.free(b)
				if a := y.members["a"]; a != nil {
					y.served(l, a)
				}
			})
		})
	}
}

// A message for the second waiter that comes too early for its attempt, and in vain, costs one
// further attempt.
func TestAMessageInVain(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		a, b := y.waitsIn(l, "a"), y.waitsIn(l, "b")
		l.becomes("elsewhere", "a", "b")
		y.seen()
		y.replyTakes(slow)
		y.Displaced(key, b)
		time.Sleep(slow / 2)
		y.publish("of b", pubsub.Event{})
		y.replyTakes(0)
		time.Sleep(slow)
		require.Equal(t, []string{"b", "b"}, y.seen())
		y.served(l, a)
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

// An event that is late, for a request that is over, is for nobody.
func TestALateEventOfAReservedChannel(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		l.becomes("")
		y.replyTakes(slow)
		a := y.ask("a", inLine)
		time.Sleep(slow / 2)
		late := y.channels[a.channel()]
		y.replyTakes(0)
		time.Sleep(slow)
		y.in(a)
		y.free(a)
		b := y.waitsIn(l, "b")
		y.seen()
		late.Notify(pubsub.Event{})
		time.Sleep(5 * latency)
		require.Empty(t, y.seen())
		y.served(l, b)
	})
}

// A request that does not wait in any case leaves the reserve to others, and one that finds too many
// waiters gives its channel back.
func TestRequestsThatDoNotWaitLeaveNoReservedChannel(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		l.becomes("elsewhere")
		once := y.ask("once", func(r *Request[*member]) {
			inLine(r)
			r.Once = true
		})
		require.ErrorIs(t, <-once.done, lock.ErrNotAcquired)
		require.Equal(t, reserveSize, y.reserved())
		waiter := y.waitsIn(l, "waiter")
		crowded := y.ask("crowded", func(r *Request[*member]) {
			inLine(r)
			r.MaxWaiters = 1
		})
		require.ErrorIs(t, <-crowded.done, lock.ErrNotAcquired)
		require.Equal(t, []string{"of waiter"}, y.subscribed())
		y.served(l, waiter)
	})
}

// A lost connection may have lost messages: all waiters whose channels are subscribed again make an
// attempt, together.
func TestWaitersTryAgainWhenReservedChannelsAreSubscribedAgain(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		a, b := y.waitsIn(l, "a"), y.waitsIn(l, "b")
		l.becomes("elsewhere", "a", "b")
		y.seen()
		y.publish("of b", pubsub.Event{Subscribed: true})
		y.publish("of a", pubsub.Event{Subscribed: true})
		time.Sleep(5 * latency)
		require.Equal(t, []string{"a,b"}, y.seen())
		y.served(l, a)
		y.served(l, b)
	})
}

// A waiter whose channel is confirmed only after its first attempt makes another one then.
func TestALateConfirmationOfAReservedChannel(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.served(l, y.waitsIn(l, "first"))
		y.deaf = true
		y.served(l, y.waitsIn(l, "second"))
		y.seen()
		m := y.waitsIn(l, "late")
		require.Equal(t, []string{"late"}, y.seen())
		y.publish("of late", pubsub.Event{Subscribed: true})
		time.Sleep(5 * latency)
		require.Equal(t, []string{"late"}, y.seen())
		y.deaf = false
		y.served(l, m)
	})
}

// However many wait, few channels are subscribed.
func TestManyWaitersHaveFewReservedChannels(t *testing.T) {
	inYard(t, func(y *yard) {
		l := newLine(y)
		y.contended(l)
		var all []*member
		for i := range 3 * maxOwn {
			all = append(all, y.waitsIn(l, fmt.Sprint("waiter ", i)))
			require.LessOrEqual(t, len(y.subscribed())+y.reserved(), maxOwn)
		}
		for _, m := range all {
			m.cancel()
			<-m.done
		}
		require.Less(t, y.reserved(), 2*reserveSize)
	})
}

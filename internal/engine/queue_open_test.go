package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/pubsub"
)

const (
	leftOpen = "1" // the message
	backoff  = 50 * time.Millisecond
)

// polled is a request for a key that others poll for.
func polled(r *Request) {
	r.LeftOpen = leftOpen
	r.Backoff = func(int) time.Duration { return backoff }
}

// releaseOpen is release where the key may be left open, and returns whether it was.
func (w *world) releaseOpen() bool {
	passed := w.pass()
	time.Sleep(latency)
	if passed {
		return false
	}
	open, payload := w.LeavesOpen(key), "0"
	if open {
		payload = leftOpen
	}
	w.set(func() { w.taken = false })
	w.notify(pubsub.Event{Payload: payload})
	w.Released(key, w.holder(), Release{Receivers: 1, leftOpen: open})
	return open
}

func TestPollsBesideMessages(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		c := w.ask(w.t.Context(), "waiter", polled)
		time.Sleep(10*backoff + backoff/2)
		assert.InDelta(t, 10, w.tries(), 2)
		before := w.tries()
		w.set(func() { w.taken = false }) // and no message
		time.Sleep(backoff + 2*latency)
		require.True(t, c.has())
		assert.Equal(t, before+1, w.tries())

		// Of a holder here it will know.
		next := w.ask(w.t.Context(), "next", polled)
		time.Sleep(2 * latency) // the subscription is confirmed, and it looks
		before = w.tries()
		time.Sleep(10 * backoff)
		assert.Equal(t, before, w.tries())
		w.release()
		require.True(t, next.has())
		w.release()

		// An expiry that comes sooner counts.
		w.takeElsewhere()
		w.set(func() { w.freeIn = backoff / 5 })
		c = w.ask(w.t.Context(), "waiter", polled)
		time.Sleep(backoff/5 + 2*latency)
		w.set(func() { w.taken = false })
		time.Sleep(backoff/5 + 2*latency)
		require.True(t, c.has())
		w.release()
	})
}

// A process that passes a key on leaves it open in good time, tells others, and does
// not come in between itself, whatever it hears.
func TestAKeyIsLeftOpenToThoseWhoPoll(t *testing.T) {
	for _, deaf := range []bool{false, true} {
		run(t, func(w *world) {
			w.deaf = deaf // to the message of its own release, too
			leavesOpenInTime(w)
		})
	}
}

func leavesOpenInTime(w *world) {
	const held = 100 * time.Millisecond
	t := w.t
	holder := w.ask(w.t.Context(), "first", polled)
	time.Sleep(2 * latency)
	require.True(t, holder.has())
	for round := range 3 {
		began, open := time.Now(), false
		var next *caller
		for !open {
			require.Less(t, time.Since(began), openEvery+2*held, "it is not left open")
			next = w.ask(w.t.Context(), "next", polled)
			time.Sleep(held)
			open = w.releaseOpen()
			if !open { // there are several turns until then
				time.Sleep(2*yieldFor + 2*latency)
				require.True(t, next.has())
			}
		}
		require.GreaterOrEqual(t, time.Since(began), openEvery-openFor-held)
		before := w.tries()
		for _, payload := range []string{"0", ""} {
			time.Sleep(openFor / 4)
			w.notify(pubsub.Event{Payload: payload, Subscribed: payload == ""})
			w.Wake(key)
		}
		var behind *caller
		if round < 2 {
			behind = w.ask(w.t.Context(), "behind", polled)
		}
		time.Sleep(openFor/2 - 10*latency)
		require.False(t, next.has())
		assert.Equal(t, before, w.tries(), "somebody here has tried")
		time.Sleep(20 * latency)
		require.True(t, next.has())
		if behind == nil {
			break
		}
		w.releaseOpen()
		time.Sleep(2*yieldFor + 2*latency)
		require.True(t, behind.has())
	}
	require.False(t, w.releaseOpen(), "nobody waits here")
}

// Who waits elsewhere is told of it, also in the middle of an attempt, and counts
// from there.
func TestAKeyLeftOpenElsewhere(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		c := w.ask(w.t.Context(), "waiter", polled)
		time.Sleep(2*openEvery + backoff/2)
		for _, during := range []bool{false, true} {
			if during {
				for before := w.tries(); w.tries() == before; {
					time.Sleep(latency / 10)
				}
				time.Sleep(latency * 7 / 10) // the server has judged
				require.Equal(t, 1, w.inFlightNow())
			}
			w.set(func() { w.taken = false })
			w.notify(pubsub.Event{Payload: leftOpen})
			w.notify(pubsub.Event{Payload: "0"})
			before := w.tries()
			time.Sleep(openFor - 10*latency)
			assert.Equal(t, before, w.tries())
			require.False(t, c.has())
			if during {
				break
			}
			w.takeElsewhere() // who polls has found it
			time.Sleep(backoff)
		}
		time.Sleep(20 * latency)
		require.True(t, c.has())
		next := w.ask(w.t.Context(), "next", polled)
		time.Sleep(openEvery / 2)
		require.False(t, w.releaseOpen(), "it was open not long ago")
		require.True(t, next.has())
		w.release()
	})
}

// A request that nobody polls beside knows nothing of it.
func TestAKeyThatNobodyPollsForIsNotLeftOpen(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		c := w.ask(w.t.Context(), "waiter")
		time.Sleep(10 * latency)
		w.set(func() { w.taken = false })
		w.notify(pubsub.Event{Payload: leftOpen})
		time.Sleep(2 * latency)
		require.True(t, c.has())
		for range 3 {
			next := w.ask(w.t.Context(), "next")
			time.Sleep(openEvery)
			require.False(t, w.releaseOpen())
			time.Sleep(2*yieldFor + 2*latency)
			require.True(t, next.has())
		}
		w.release()
	})
}

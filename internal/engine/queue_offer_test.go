package engine

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// permit asks for one of several that members of a process can have.
func permit(r *Request) {
	r.Shareable, r.Shared, r.Group, r.Counting = true, true, true, true
}

// permits are members who wait for a permit. They make no attempt any more, by
// themselves, for as long as the test does not sleep for long.
func (y *yard) permits(names ...string) (all []*member) {
	y.answers(nobody)
	for _, name := range names {
		all = append(all, y.ask(name, permit))
		time.Sleep(10 * latency)
	}
	y.waits(all...)
	y.seen()
	return all
}

// offer offers what somebody gives back to those who wait.
func (y *yard) offer() bool {
	return y.Offer(key, func(all []Acquirer) []Answer {
		return all[0].TryAll(y.t.Context(), all)
	})
}

// first is the answer of a server that has n permits.
func first(n int) func(names []string) []Answer {
	return func(names []string) []Answer {
		return append(everybody(names[:min(n, len(names))]), nobody(names[min(n, len(names)):])...)
	}
}

func (y *yard) idle() bool {
	idle := true
	y.with(key, func(*entry) { idle = false })
	return idle
}

func TestNobodyIsOnRecordForWhatIsNotHeld(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(everybody)
		a := y.ask("a", permit)
		time.Sleep(2 * latency)
		y.in(a)
		require.True(t, y.idle())
		once := y.ask("once", func(r *Request) { permit(r); r.Once = true })
		time.Sleep(2 * latency)
		y.in(once)
		require.Empty(t, y.Holders(key))
		require.True(t, y.idle())

		all := y.permits("b", "c")
		y.answers(everybody)
		once = y.ask("again", func(r *Request) { permit(r); r.Once = true })
		time.Sleep(10 * latency)
		y.in(once)
		require.Equal(t, []string{"again"}, y.seen(), "it says nothing of what is left")
		y.waits(all...)
		y.publish("all", pubsub.Event{})
		time.Sleep(2 * latency)
		y.in(all...)
		require.True(t, y.idle())
	})
}

func TestAnOfferIsForThoseWhoWait(t *testing.T) {
	inYard(t, func(y *yard) {
		require.False(t, y.offer(), "nobody is there")
		all := y.permits("a", "b", "c", "d")
		y.answers(first(2))
		require.True(t, y.offer())
		require.Equal(t, []string{"a,b,c,d"}, y.seen())
		y.in(all[:2]...)
		y.waits(all[2:]...)
		time.Sleep(10 * latency)
		require.Empty(t, y.seen(), "one request is enough")

		y.answers(nobody)
		require.True(t, y.offer())
		y.waits(all[2:]...)
		y.seen()
		y.answers(everybody)
		require.True(t, y.offer())
		y.in(all[2:]...)
		require.Equal(t, []string{"c,d"}, y.seen())
		require.True(t, y.idle())
	})
}

func TestWhoWasServedByAnOfferKnows(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		var causes []telemetry.Cause
		a := y.ask("a", func(r *Request) {
			permit(r)
			r.OnWake = func(c telemetry.Cause) { causes = append(causes, c) }
		})
		time.Sleep(10 * latency)
		y.answers(everybody)
		require.True(t, y.offer())
		y.in(a)
		require.Equal(t, []telemetry.Cause{telemetry.Subscribed, telemetry.HandedOver}, causes)
	})
}

func TestNothingIsOfferedDuringAnAttempt(t *testing.T) {
	inYard(t, func(y *yard) {
		a := y.ask("a", permit) // its first attempt is under way
		require.False(t, y.offer())
		y.answers(nobody)
		b := y.ask("b", permit)
		require.False(t, y.offer())
		time.Sleep(10 * latency)
		y.waits(a, b)
		y.publish("all", pubsub.Event{})
		time.Sleep(latency / 2)
		require.False(t, y.offer())
		y.answers(everybody)
		time.Sleep(latency)
		y.in(a, b)
	})
}

func TestWhatHappensDuringAnOfferIsNotMissed(t *testing.T) {
	inYard(t, func(y *yard) {
		all := y.permits("a", "b")
		y.answers(nobody)
		done := make(chan bool)
		go func() { done <- y.offer() }()
		time.Sleep(latency / 2)
		require.False(t, y.offer(), "one at a time")
		y.publish("all", pubsub.Event{})
		time.Sleep(latency / 4)
		require.Empty(t, y.seen(), "an offer is an attempt")
		require.True(t, <-done)
		y.answers(everybody)
		time.Sleep(2 * latency)
		y.in(all...)
		require.Equal(t, []string{"a,b", "a,b"}, y.seen())
	})
}

func TestWhatHappenedBeforeAnOfferIsSeenToByIt(t *testing.T) {
	inYard(t, func(y *yard) {
		all := y.permits("a", "b")
		y.with(key, func(e *entry) { e.markLocked(telemetry.Message) })
		y.answers(first(1))
		require.True(t, y.offer())
		y.in(all[0])
		y.waits(all[1])
		time.Sleep(10 * latency)
		require.Equal(t, []string{"a,b"}, y.seen())
		y.answers(everybody)
		require.True(t, y.offer())
		y.in(all[1])
	})
}

func TestOffersHaveALimit(t *testing.T) {
	inYard(t, func(y *yard) {
		var names []string
		for range 2*handOffs + 2 {
			names = append(names, "m")
		}
		all := y.permits(names...)
		y.answers(first(1))
		for round := range 2 {
			for i := range handOffs {
				require.True(t, y.offer())
				y.in(all[round*handOffs+i])
			}
			require.False(t, y.offer(), "others have their turn")
		}
		y.answers(everybody)
		require.True(t, y.offer())
		y.in(all[2*handOffs:]...)
	})
}

func TestAnOfferToManyHasALimit(t *testing.T) {
	inYard(t, func(y *yard) {
		var names []string
		for range maxGroup + 5 {
			names = append(names, "m")
		}
		all := y.permits(names...)
		y.answers(everybody)
		require.True(t, y.offer())
		y.in(all[:maxGroup]...)
		time.Sleep(10 * latency) // the others see for themselves
		y.in(all[maxGroup:]...)
		require.Len(t, y.seen(), 2)
	})
}

func TestWhoLeavesDuringAnOfferIsGivenBack(t *testing.T) {
	inYard(t, func(y *yard) {
		all := y.permits("a", "b", "c")
		y.answers(first(2))
		done := make(chan bool)
		y.delay = 3 * slow
		go func() { done <- y.offer() }()
		time.Sleep(latency / 2)
		for _, i := range []int{0, 2} {
			all[i].cancel()
			y.left(all[i])
		}
		require.True(t, <-done)
		y.in(all[1])
		require.Equal(t, []string{"a", "c"}, y.abandoned)
		require.True(t, y.idle())
	})
}

func TestAnOfferThatFails(t *testing.T) {
	errBoom := errors.New("boom")
	inYard(t, func(y *yard) {
		all := y.permits("a", "b")
		y.answers(func(names []string) []Answer { return same(names, Answer{Err: &Unavailable{errBoom}}) })
		require.True(t, y.offer())
		y.waits(all...)
		y.seen()
		y.answers(first(1))
		time.Sleep(2 * maxRetry)
		y.in(all[0]) // it has tried again
		y.waits(all[1])
		all[1].cancel()
		require.ErrorIs(t, <-all[1].done, lock.ErrNotAcquired)

		all = y.permits("c", "d")
		y.answers(func(names []string) []Answer { return same(names, Answer{Err: errBoom}) })
		require.True(t, y.offer())
		for _, m := range all {
			require.Equal(t, errBoom, <-m.done)
		}
		require.True(t, y.idle())
	})
}

func TestWhenToLookAgainIsKnownFromAnOffer(t *testing.T) {
	inYard(t, func(y *yard) {
		const free = 100 * time.Millisecond
		all := y.permits("a", "b")
		y.answers(func(names []string) []Answer {
			results := everybody(names)
			results[1] = Answer{FreeIn: free}
			return results
		})
		require.True(t, y.offer())
		y.in(all[0])
		y.waits(all[1])
		y.seen()
		y.answers(everybody)
		time.Sleep(free - 2*latency)
		require.Empty(t, y.seen())
		time.Sleep(20 * latency) // a tick of the wheel, and the attempt
		y.in(all[1])
	})
}

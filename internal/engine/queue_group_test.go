package engine

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/lock"
)

func reader(r *Request) { r.Shareable, r.Shared, r.Group = true, true, true }

func TestACallerThatLeavesAwaitsTheAnswerOfAnAttemptForAMoment(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		var all []*member
		for _, name := range []string{"a", "b", "c"} {
			all = append(all, y.ask(name, reader))
		}
		time.Sleep(10 * latency)
		y.answers(func(names []string) []Answer {
			results := nobody(names)
			results[0].Acquired = names[0] == "a"
			return results
		})

		y.publish("all", hub.Event{})
		time.Sleep(latency / 2) // the attempt is under way
		all[0].cancel()
		all[1].cancel()
		time.Sleep(latency)

		y.in(all[0]) // which gives it back
		err := <-all[1].done
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		y.leaves(all[2])
		y.free(all[0])
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
		y.publish("all", hub.Event{})
		time.Sleep(10 * latency)
		y.in(all...)
		require.Len(t, y.seen(), 3)
		y.free(all...)
	})
}

// several is somebody who asks for several keys together: the one of the yard and others that nobody
// else wants.
type several struct {
	y     *yard
	reqs  []Request
	asked int // how many it has asked the server for
	done  chan int
}

// together asks for all keys, of which the second is that of the yard. The server gives the first of them.
func (y *yard) together(name string, once bool, gives int) *several {
	s := &several{y: y, done: make(chan int, 1)}
	for _, k := range []Key{{Kind: "lock", Name: "invoices"}, key, {Kind: "lock", Name: "stock"}} {
		s.reqs = append(s.reqs, Request{Key: k, Acquirer: &member{y: y, name: name}, Once: once})
	}
	go func() {
		s.done <- y.Together(s.reqs, func(n int) int {
			time.Sleep(latency)
			y.set(func() { y.attempts = append(y.attempts, name) })
			s.asked = n
			return min(gives, n)
		})
	}()
	synctest.Wait()
	return s
}

// got waits until the attempt is over and checks how many it has got.
func (s *several) got(want int) {
	s.y.t.Helper()
	require.Equal(s.y.t, want, <-s.done)
	for i, req := range s.reqs {
		assert.Equal(s.y.t, i < want, len(s.y.Holders(req.Key)) > 0 && s.y.Holders(req.Key)[0] == req.Acquirer)
	}
}

// released gives back the first n.
func (s *several) released(n int) {
	for _, req := range s.reqs[:n] {
		s.y.Released(req.Key, req.Acquirer, Release{Receivers: 0})
	}
	synctest.Wait()
}

// gets waits for the attempts that m still needs, and has it release what it gets.
func (y *yard) gets(m *member) {
	y.t.Helper()
	time.Sleep(4 * latency)
	y.in(m)
	y.free(m)
}

// A caller that waits is not overtaken by one that asks for several keys, unless that makes one attempt.
func TestTogetherDoesNotPassWhoWaits(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody) // another process has it
		ben := y.ask("ben", exclusive)
		y.waits(ben)
		time.Sleep(2 * latency)

		s := y.together("ann", false, 3)
		s.got(1)
		require.Equal(t, 1, s.asked)
		s.released(1)

		s = y.together("cid", true, 0)
		s.got(0)
		require.Equal(t, 3, s.asked)
		y.leaves(ben)
	})
}

func TestAnAttemptTogetherIsAnAttemptOfEachKey(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(everybody)
		s := y.together("ann", false, 1) // not its key
		time.Sleep(latency / 2)
		ben := y.ask("ben", exclusive) // comes while it is under way
		time.Sleep(latency * 5 / 4)
		require.Equal(t, []string{"ann"}, y.seen(), "two attempts for one key at once")
		s.got(1)
		time.Sleep(2 * latency)
		require.Equal(t, []string{"ben"}, y.seen(), "who waited for the attempt is forgotten")
		y.gets(ben)
		s.released(1)

		s = y.together("ann", false, 0)
		ben = y.ask("ben", exclusive)
		s.got(0)
		y.gets(ben)
	})
}

// Others than those who ask together go on beside an attempt that is made once.
func TestAnAttemptMadeOnceKeepsNobodyOut(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(everybody)
		s := y.together("ann", true, 0)
		ben := y.ask("ben", exclusive)
		time.Sleep(4 * latency)
		s.got(0)
		y.gets(ben)

		// Nor does it end the attempt of another.
		s = y.together("ann", true, 0)
		time.Sleep(latency / 2)
		ben = y.ask("ben", exclusive)
		s.got(0)
		cid := y.ask("cid", exclusive)
		time.Sleep(latency * 5 / 4) // it would have its answer by now
		y.in(ben)
		require.NotContains(t, y.seen(), "cid", "two attempts for one key at once")
		y.answers(nobody)
		y.leaves(cid)
		y.free(ben)
	})
}

// A message that comes during the attempt is for who waits then.
func TestAMessageDuringAnAttemptTogetherIsNotForgotten(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		s := y.together("ann", false, 1)
		ben := y.ask("ben", exclusive)
		s.got(1)
		y.waits(ben)
		time.Sleep(2 * latency)
		y.answers(everybody)
		y.Wake(key)
		y.gets(ben)
		s.released(1)
	})
}

// permits are members who wait for one of several permits. They make no attempt any more, by themselves,
// for as long as the test does not sleep for long.
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

func permit(r *Request) { r.Shareable, r.Shared, r.Group, r.Counting = true, true, true, true }

// offer offers what somebody gives back to those who wait.
func (y *yard) offer() bool {
	return y.Offer(key, func(all []Acquirer) []Answer { return all[0].TryAll(y.t.Context(), all) })
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

		y.publish("all", hub.Event{})
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
		y.publish("all", hub.Event{})
		time.Sleep(latency / 4)
		require.Empty(t, y.seen(), "an offer is an attempt")
		require.True(t, <-done)

		y.answers(everybody)
		time.Sleep(2 * latency)
		y.in(all...)
		require.Equal(t, []string{"a,b", "a,b"}, y.seen())
	})
}

func TestOffersEndWithTheTurn(t *testing.T) {
	inYard(t, func(y *yard) {
		all := y.permits("a", "b", "c", "d", "e", "f")
		y.answers(first(1))
		y.Gave(key, "all", 2) // somebody else listens
		for i := range turnRounds - 1 {
			require.True(t, y.offer())
			y.in(all[i])
			time.Sleep(latency)
		}
		require.False(t, y.offer(), "others have their turn")
		y.Gave(key, "all", 2)

		y.answers(everybody)
		time.Sleep(2 * leastPause)
		y.in(all[turnRounds-1:]...)
	})
}

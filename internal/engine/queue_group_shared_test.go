package engine

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// several is somebody who asks for several keys together: the one of the yard and others
// that nobody else wants.
type several struct {
	y    *yard
	reqs []Request
	done chan int
}

// togetherKeys are in their order; the second is that of the yard.
var togetherKeys = []Key{{Kind: "lock", Name: "invoices"}, key, {Kind: "lock", Name: "stock"}}

// together asks for all keys; answer is what the server says to an attempt for n.
func (y *yard) together(name string, once bool, answer func(n int) int) *several {
	s := &several{y: y, done: make(chan int, 1)}
	for _, k := range togetherKeys {
		s.reqs = append(s.reqs, Request{Key: k, Acquirer: &member{y: y, name: name}, Once: once})
	}
	go func() {
		s.done <- y.Together(s.reqs, func(n int) int {
			time.Sleep(latency)
			y.mu.Lock()
			y.attempts = append(y.attempts, name)
			y.mu.Unlock()
			return answer(n)
		})
	}()
	synctest.Wait()
	return s
}

// got waits until the attempt is over and checks how many it has got.
func (s *several) got(want int) {
	s.y.t.Helper()
	synctest.Wait()
	select {
	case n := <-s.done:
		require.Equal(s.y.t, want, n)
	case <-time.After(latency):
		require.Equal(s.y.t, want, <-s.done)
	}
	for i, req := range s.reqs {
		if i < want {
			require.Contains(s.y.t, s.y.Holders(req.Key), req.Acquirer)
		} else {
			require.NotContains(s.y.t, s.y.Holders(req.Key), req.Acquirer)
		}
	}
}

// released gives back the first n.
func (s *several) released(n int) {
	for _, req := range s.reqs[:n] {
		s.y.Released(req.Key, req.Acquirer, Release{Receivers: 0})
	}
	synctest.Wait()
}

// firstOf is a server that gives that many of them, from the first on.
func firstOf(got int) func(n int) int { return func(int) int { return got } }

// gets waits for the attempts that m still needs.
func (y *yard) gets(m *member) {
	y.t.Helper()
	time.Sleep(4 * latency)
	y.in(m)
}

func exclusive(*Request) {}

func TestKeysAreTakenTogether(t *testing.T) {
	inYard(t, func(y *yard) {
		for _, once := range []bool{false, true} {
			s := y.together("ann", once, func(n int) int {
				assert.Len(t, togetherKeys, n)
				return n
			})
			s.got(3)
			require.Equal(t, []string{"ann"}, y.seen())
			// A caller that comes now waits for them, and is next.
			y.answers(everybody)
			ben := y.ask("ben", exclusive)
			y.waits(ben)
			require.Empty(t, y.seen())
			s.released(3)
			y.gets(ben)
			y.Released(key, ben, Release{Receivers: 0})
			y.seen()
		}
	})
}

func TestTogetherTakesThoseBeforeTheFirstThatIsTaken(t *testing.T) {
	inYard(t, func(y *yard) {
		// Somebody else has it: the server says so.
		s := y.together("ann", false, firstOf(1))
		s.got(1)
		s.released(1)
		// Somebody of this process has it, or waits for it: the server is not asked.
		y.answers(everybody)
		ben := y.ask("ben", exclusive)
		y.gets(ben)
		cid := y.ask("cid", exclusive)
		y.seen()
		for range 2 {
			s = y.together("ann", false, func(n int) int {
				assert.Equal(t, 1, n)
				return n
			})
			s.got(1)
			s.released(1)
			require.Equal(t, []string{"ann"}, y.seen())
			if !y.has(cid) { // the second time it is cid who has it
				y.Released(key, ben, Release{Receivers: 0})
				y.gets(cid)
				y.seen()
			}
		}
		y.Released(key, cid, Release{Receivers: 0})
	})
}

// has reports whether m is a holder.
func (y *yard) has(m *member) bool {
	return slices.Contains(y.Holders(key), Acquirer(m))
}

func TestTogetherDoesNotPassWhoWaits(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody) // another process has it
		ben := y.ask("ben", exclusive)
		y.waits(ben)
		time.Sleep(2 * latency)
		y.seen()
		s := y.together("ann", false, func(n int) int {
			assert.Equal(t, 1, n, "it asks for what somebody waits for")
			return n
		})
		s.got(1)
		s.released(1)
		// Who makes one attempt makes it in any case.
		s = y.together("cid", true, func(n int) int {
			assert.Equal(t, 3, n)
			return 0
		})
		s.got(0)
		ben.cancel()
		require.Error(t, <-ben.done)
	})
}

// The first key is not to be had: nothing is sent, and nothing is on record.
func TestTogetherAsksNothingWhereTheFirstIsTaken(t *testing.T) {
	inYard(t, func(y *yard) {
		first := y.together("ann", false, firstOf(1))
		first.got(1)
		s := y.together("ben", false, func(int) int {
			assert.Fail(t, "it asks for what this process holds")
			return 0
		})
		s.got(0)
		first.released(1)
	})
}

func TestAnAttemptTogetherIsAnAttemptOfEachKey(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(everybody)
		s := y.together("ann", false, firstOf(1)) // not its key
		time.Sleep(latency / 2)
		ben := y.ask("ben", exclusive) // comes while it is under way
		time.Sleep(latency * 5 / 4)
		require.Equal(t, []string{"ann"}, y.seen(), "two attempts for one key at once")
		s.got(1)
		time.Sleep(2 * latency)
		require.Equal(t, []string{"ben"}, y.seen(), "who waited for the attempt is forgotten")
		y.gets(ben)
		y.Released(key, ben, Release{Receivers: 0})
		s.released(1)

		s = y.together("ann", false, firstOf(0))
		ben = y.ask("ben", exclusive)
		s.got(0)
		y.gets(ben)
		y.Released(key, ben, Release{Receivers: 0})
	})
}

// Others than those who ask together go on beside an attempt that is made once.
func TestAnAttemptMadeOnceKeepsNobodyOut(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(everybody)
		s := y.together("ann", true, firstOf(0))
		ben := y.ask("ben", exclusive)
		y.gets(ben)
		s.got(0)
		require.Equal(t, []Acquirer{ben}, y.Holders(key))
		y.Released(key, ben, Release{Receivers: 0})

		// Nor does it end the attempt of another.
		s = y.together("ann", true, firstOf(0))
		time.Sleep(latency / 2)
		ben = y.ask("ben", exclusive)
		s.got(0)
		cid := y.ask("cid", exclusive)
		time.Sleep(latency * 5 / 4) // it would have its answer by now
		y.in(ben)
		require.NotContains(t, y.seen(), "cid", "two attempts for one key at once")
		y.answers(nobody)
		cid.cancel()
		require.Error(t, <-cid.done)
		y.Released(key, ben, Release{Receivers: 0})
	})
}

// A message that comes during the attempt is for who waits then.
func TestAMessageDuringAnAttemptTogetherIsNotForgotten(t *testing.T) {
	inYard(t, func(y *yard) {
		y.answers(nobody)
		s := y.together("ann", false, firstOf(1))
		ben := y.ask("ben", exclusive)
		s.got(1)
		y.waits(ben)
		time.Sleep(2 * latency)
		y.seen()
		y.answers(everybody)
		y.Wake(key)
		y.gets(ben)
		y.Released(key, ben, Release{Receivers: 0})
		s.released(1)
	})
}

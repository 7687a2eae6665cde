package election_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const safetyPoll = 5 * time.Second

// observed is what an iteration yields.
type observed struct {
	leader election.Leader
	err    error
}

// observe iterates in the background. The channel is closed at the end.
func observe(ctx context.Context, e *election.Election) <-chan observed {
	all := make(chan observed, 2000)
	go func() {
		defer close(all)
		for leader, err := range e.Observe(ctx) {
			all <- observed{leader, err}
		}
	}()
	return all
}

func firstError(e *election.Election, ctx context.Context) error {
	for _, err := range e.Observe(ctx) {
		return err
	}
	return errors.New("the iteration is empty")
}

func sees(t testing.TB, all <-chan observed, term *election.Term, within time.Duration) {
	t.Helper()
	require.Equal(t, observed{describe(term), nil}, harness.Receive(t, within, "the next leader", all))
}

// ended fails the test unless the iteration has ended with one error, which it returns.
func ended(t testing.TB, all <-chan observed, within time.Duration) error {
	t.Helper()
	last := harness.Receive(t, within, "the end of the iteration", all)
	require.Error(t, last.err)
	require.Zero(t, last.leader)
	_, more := <-all
	require.False(t, more)
	return last.err
}

// subscribed waits until the server has confirmed the subscription of an observer.
func subscribed(t testing.TB, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, soon, "it is subscribed", func() bool { return c.Stats().PubSub.Subscribed == 1 })
}

func TestObserve(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, c := harness.Client(t, s), harness.Client(t, s)
		e := c.Election(name)
		ctx, cancel := context.WithCancelCause(t.Context())
		early := observe(ctx, e)
		subscribed(t, c)
		term := campaign(t, a, "first")
		sees(t, early, term, soon)
		late := observe(ctx, e)
		sees(t, late, term, soon)
		for i := range 3 {
			resign(t, term)
			term = campaign(t, a, fmt.Sprint("next ", i))
			sees(t, early, term, soon)
			sees(t, late, term, soon)
		}

		for leader, err := range e.Observe(ctx) { // and leaves
			require.NoError(t, err)
			require.Equal(t, describe(term), leader)
			break
		}
		require.Equal(t, 2, c.Stats().PubSub.Listeners)
		cause := errors.New("over")
		cancel(cause)
		for _, all := range []<-chan observed{early, late} {
			err := ended(t, all, soon)
			require.ErrorIs(t, err, cause)
			for _, kind := range []error{lock.ErrUnavailable, lock.ErrNotAcquired, lock.ErrClosed} {
				require.NotErrorIs(t, err, kind)
			}
		}
		require.Zero(t, c.Stats().PubSub.Listeners)
		resign(t, term)
		onlyTokensLeft(t, s)
	})
}

// An observer that gets no messages reads at intervals.
func TestObserveWithoutMessages(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		a, c := s.Client(t), s.Client(t)
		ctx, cancel := context.WithCancel(t.Context())
		all := observe(ctx, c.Election(name))
		term := campaign(t, a, "")
		sees(t, all, term, time.Second)
		for range 100 {
			resign(t, term)
			term = campaign(t, a, "")
			sees(t, all, term, time.Second)
		}
		time.Sleep(safetyPoll) // the last messages may cause further reads
		s.Reset()
		time.Sleep(time.Hour)
		require.InDelta(t, float64(time.Hour/safetyPoll), s.Calls("hmget"), 1)
		require.Empty(t, all)

		// Nobody announces this one.
		resign(t, term)
		require.NoError(t, only(a.FairLock(name).ForceUnlock(t.Context())))
		s.HSet(wire.ElectionTerm(name), "owner", a.NewOwner().String(), "token", "4711", "value", "silent")
		owner := s.HGet(wire.ElectionTerm(name), "owner")
		s.HSet(name, owner, "1")
		got := harness.Receive(t, safetyPoll+time.Second, "the leader", all)
		require.Equal(t, "silent", got.leader.Value)
		require.EqualValues(t, 4711, got.leader.Token)
		cancel()
		require.ErrorIs(t, ended(t, all, time.Second), context.Canceled)
		s.Del(name)
	})
}

// Observers that lose every message, their connection, or nothing arrive at the right leader after
// many changes.
func TestObserversArrive(t *testing.T) {
	changes := harness.Size(60, 1000)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, heard := harness.Client(t, s), harness.Client(t, s)
		deaf, mute := harness.GatedClient(t, s)
		mute.Mute()
		cut, unstable := harness.GatedClient(t, s)
		observers := map[string]<-chan observed{}
		for what, c := range map[string]*redlatch.Client{"hears": heard, "hears nothing": deaf, "is cut off": cut} {
			observers[what] = observe(t.Context(), c.Election(name))
			subscribed(t, c)
		}
		var term *election.Term
		for i := range changes {
			if term != nil {
				resign(t, term)
			}
			term = campaign(t, a, fmt.Sprint(i))
			if i%20 == 10 {
				unstable.Redirect(s) // cuts the connections
			}
		}
		for what, all := range observers {
			var last election.Leader
			for last != describe(term) {
				next := harness.Receive(t, safetyPoll+soon, "the last leader: "+what, all)
				require.NoError(t, next.err, what)
				require.Greater(t, next.leader.Token, last.Token, what)
				last = next.leader
			}
		}
		require.Zero(t, deaf.Stats().PubSub.Messages)
		resign(t, term)
	})
}

// A slow consumer gets the current leader, not each one.
func TestSlowConsumerSkips(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, c := harness.Client(t, s), harness.Client(t, s)
		term := campaign(t, a, "")
		n := 0
		for leader, err := range c.Election(name).Observe(t.Context()) {
			require.NoError(t, err)
			require.Equal(t, describe(term), leader)
			if n++; n == 3 {
				break
			}
			for range 10 {
				resign(t, term)
				term = campaign(t, a, "")
			}
		}
		resign(t, term)
	})
}

// An iteration ends when the client is closed or shut down, even if nobody ever leads.
func TestObserveAndClose(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, end := range []func(c *redlatch.Client){
			(*redlatch.Client).Close,
			func(c *redlatch.Client) { require.NoError(t, c.Shutdown(t.Context())) },
		} {
			c := harness.Client(t, s)
			all := observe(t.Context(), c.Election(name))
			subscribed(t, c)
			end(c)
			require.ErrorIs(t, ended(t, all, soon), lock.ErrClosed)
		}
	})
}

// An iteration waits for the server for as long as its context allows. A refusal ends it at once.
func TestObserveAndOutage(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		const timeout = time.Second
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		term := campaign(t, harness.Client(t, s), "")
		over := errors.New("over")
		ctx, cancel := context.WithTimeoutCause(t.Context(), safetyPoll+2*timeout, over)
		defer cancel()
		short, long := observe(ctx, c.Election(name)), observe(t.Context(), c.Election(name))
		sees(t, short, term, soon)
		sees(t, long, term, soon)

		s.Kill()
		err := ended(t, short, safetyPoll+2*timeout+soon)
		require.ErrorIs(t, err, over)
		require.ErrorIs(t, err, lock.ErrUnavailable)
		require.Empty(t, long)

		require.NoError(t, s.Restart())
		next := campaign(t, harness.Client(t, s), "next")
		sees(t, long, next, safetyPoll+soon)
		resign(t, next)
		require.ErrorIs(t, term.Resign(t.Context()), lock.ErrLost)

		harness.Do(t, s.Addr, "DEL", wire.ElectionTerm(name))
		harness.Do(t, s.Addr, "LPUSH", wire.ElectionTerm(name), "x")
		require.ErrorContains(t, ended(t, long, safetyPoll+soon), "WRONGTYPE")
	})
}

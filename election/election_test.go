package election_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	// name is the election of most tests.
	name = "boss"
	// soon is well below the safety poll.
	soon = 3 * time.Second
)

func campaign(t testing.TB, c *redlatch.Client, value string, opts ...lock.Option) *election.Term {
	t.Helper()
	term, err := c.Election(name).Campaign(t.Context(), value, opts...)
	require.NoError(t, err)
	return term
}

// stand begins a campaign in the background.
func stand(t testing.TB, c *redlatch.Client, value string, opts ...lock.Option) *harness.Call[*election.Term] {
	t.Helper()
	return harness.Start(t, t.Context(), func(ctx context.Context) (*election.Term, error) {
		return c.Election(name).Campaign(ctx, value, opts...)
	})
}

func resign(t testing.TB, term *election.Term) {
	t.Helper()
	require.NoError(t, term.Resign(context.Background()))
}

func leads(t testing.TB, c *redlatch.Client, term *election.Term) {
	t.Helper()
	leader, err := c.Election(name).Leader(t.Context())
	require.NoError(t, err)
	require.Equal(t, describe(term), leader)
}

func describe(term *election.Term) election.Leader {
	return election.Leader{Value: term.Value(), Token: term.Token(), Owner: term.Owner()}
}

func nobodyLeads(t testing.TB, c *redlatch.Client) {
	t.Helper()
	_, err := c.Election(name).Leader(t.Context())
	require.ErrorIs(t, err, election.ErrNoLeader)
}

// onlyTokensLeft fails the test unless the last term is all that is left on the server.
func onlyTokensLeft(t testing.TB, s *testserver.Server) {
	t.Helper()
	require.EqualValues(t, -1, harness.PTTL(t, s.Addr, wire.ElectionTerm(name)), "a term without its token")
	harness.Do(t, s.Addr, "DEL", wire.ElectionTerm(name))
	harness.NothingLeft(t, s.Addr)
}

func TestTerms(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, b := harness.Client(t, s), harness.Client(t, s)
		nobodyLeads(t, a)
		first := campaign(t, a, "first")
		require.EqualValues(t, 1, first.Token())
		require.Equal(t, "first", first.Value())
		require.Positive(t, first.Remaining())
		leads(t, b, first)

		second := stand(t, b, "")
		harness.Waits(t, 1, b)
		third := stand(t, a, "third")
		harness.Waits(t, 1, a)
		waiting, err := a.FairLock(name).Queue(t.Context())
		require.NoError(t, err)
		require.Len(t, waiting, 2)
		_, err = b.Election(name).Campaign(t.Context(), "late", lock.Wait(0))
		require.ErrorIs(t, err, lock.ErrNotAcquired)

		last := first
		for _, next := range []*harness.Call[*election.Term]{second, third} {
			require.True(t, next.Running())
			resign(t, last)
			require.ErrorIs(t, context.Cause(last.Context()), context.Canceled)
			require.Zero(t, last.Remaining())
			require.ErrorIs(t, last.Resign(t.Context()), lock.ErrNotHeld)
			term := next.Got()
			require.Equal(t, last.Token()+1, term.Token())
			require.NotEqual(t, last.Owner(), term.Owner(), "in the same process too")
			leads(t, a, term)
			last = term
		}
		resign(t, last)
		nobodyLeads(t, b)
		onlyTokensLeft(t, s)
	})
}

// What holds the lock of an election without a term does not lead.
func TestTheHolderOfTheLockIsNoLeader(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		resign(t, campaign(t, c, "earlier"))
		h, err := other.FairLock(name).Lock(t.Context())
		require.NoError(t, err)
		nobodyLeads(t, c)
		next := stand(t, c, "next")
		harness.Waits(t, 1, c)
		require.NoError(t, h.Unlock(t.Context()))
		term := next.Got()
		leads(t, other, term)

		held, err := other.FairLock(name).ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, held)
		nobodyLeads(t, c)
		require.ErrorIs(t, term.Resign(t.Context()), lock.ErrLost)
		onlyTokensLeft(t, s)
	})
}

// In the time of AtLeast after an early Resign nobody leads.
func TestAtLeast(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		term := campaign(t, c, "", lock.AtLeast(time.Minute))
		next := stand(t, s.Client(t), "")
		resign(t, term)
		nobodyLeads(t, c)
		time.Sleep(time.Minute - time.Millisecond)
		synctest.Wait()
		require.True(t, next.Running())
		resign(t, next.Got())
	})
}

// A candidate whose term does not begin gives the lock back, also with AtLeast.
func TestTermThatDoesNotBegin(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		other := harness.Client(t, s)
		begin := harness.Load(t, s.Addr, "begin.lua")
		resign(t, campaign(t, c, ""))
		isFree := func() {
			t.Helper()
			h, err := other.FairLock(name).Lock(t.Context(), lock.Wait(soon))
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))
			nobodyLeads(t, other)
		}

		t.Run("cancelled", func(t *testing.T) {
			var call *harness.Call[*election.Term]
			g.Keep(t, begin, 1, func() { call = stand(t, c, "", lock.AtLeast(time.Minute)) })
			cause := errors.New("over")
			call.Cancel(cause)
			err := call.EndWithin(soon)
			require.ErrorIs(t, err, cause)
			require.NotEqual(t, errors.Is(err, lock.ErrNotAcquired), errors.Is(err, lock.ErrIndeterminate), "%v", err)
			require.NoError(t, g.Open())
			isFree()
		})
		t.Run("lock lost", func(t *testing.T) {
			reached := g.Arm(harness.DelayRequest, begin, 1)
			call := stand(t, c, "", lock.AtLeast(time.Minute))
			harness.Reached(t, reached)
			harness.Do(t, s.Addr, "DEL", name)
			require.ErrorIs(t, call.End(), lock.ErrNotAcquired)
			require.NoError(t, g.Open())
			isFree()
		})
		t.Run("refused", func(t *testing.T) {
			harness.Do(t, s.Addr, "DEL", wire.ElectionTerm(name))
			harness.Do(t, s.Addr, "SET", wire.ElectionTerm(name), "x")
			_, err := c.Election(name).Campaign(t.Context(), "", lock.AtLeast(time.Minute))
			var refusal *rueidis.RedisError
			require.ErrorAs(t, err, &refusal)
			require.ErrorContains(t, err, "WRONGTYPE")
			for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate} {
				require.NotErrorIs(t, err, kind)
			}
			_, err = c.Election(name).Leader(t.Context())
			require.ErrorContains(t, err, "WRONGTYPE")
			harness.Do(t, s.Addr, "DEL", wire.ElectionTerm(name))
			isFree()
		})
		t.Run("silence", func(t *testing.T) {
			reached := g.Arm(harness.Silence, begin, 1)
			call := stand(t, c, "", lock.Lease(2*time.Second))
			harness.Reached(t, reached)
			g.Stall()
			require.ErrorIs(t, call.End(), lock.ErrUnavailable, "the lease is over, so no term can begin")
			require.NoError(t, g.Open())
			isFree()
		})
		onlyTokensLeft(t, s)
	})
}

func TestInvalid(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		work := func(context.Context, *election.Term) error { return nil }
		var none context.Context
		for what, err := range map[string]error{
			"name":           only(c.Election("").Campaign(t.Context(), "")),
			"name of Leader": only(c.Election("").Leader(t.Context())),
			"name of Run":    c.Election("").Run(t.Context(), "", work),
			"name observed":  firstError(c.Election(""), t.Context()),
			"option":         only(c.Election(name).Campaign(t.Context(), "", lock.Lease(-1))),
			"option of Run":  c.Election(name).Run(t.Context(), "", work, nil),
			"function":       c.Election(name).Run(t.Context(), "", nil),
			"context":        only(c.Election(name).Campaign(none, "")),
			"of Leader":      only(c.Election(name).Leader(none)),
			"of Run":         c.Election(name).Run(none, "", work),
			"observed":       firstError(c.Election(name), none),
		} {
			require.ErrorIs(t, err, lock.ErrInvalid, what)
		}
		harness.NothingLeft(t, s.Addr)

		c.Close()
		for _, err := range []error{
			only(c.Election(name).Campaign(t.Context(), "")), only(c.Election(name).Leader(t.Context())),
			c.Election(name).Run(t.Context(), "", work), firstError(c.Election(name), t.Context()),
		} {
			require.ErrorIs(t, err, lock.ErrClosed)
		}
	})
}

// only returns the error of two results.
func only(_ any, err error) error { return err }

// A term has a token from 1 to 2^53-1, or it does not begin, and the candidate leaves.
func TestATermWithoutATokenDoesNotBegin(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		key := wire.ElectionTerm(name)
		for _, set := range [][]string{
			{"HSET", key, "token", "9007199254740991"}, {"HSET", key, "token", "9223372036854775807"},
			{"HSET", key, "token", "-1000"}, {"HSET", key, "token", "-1"}, {"HSET", key, "token", "many"}, {"RPUSH", key, "x"},
		} {
			harness.Do(t, s.Addr, set...)
			before, err := testserver.Query(s.Addr, "DUMP", key)
			require.NoError(t, err)
			_, err = c.Election(name).Campaign(t.Context(), "")
			require.ErrorContains(t, err, "fencing counter", "%v", set)
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
			require.NotErrorIs(t, err, lock.ErrUnavailable)
			after, err := testserver.Query(s.Addr, "DUMP", key)
			require.NoError(t, err)
			require.Equal(t, before, after)
			harness.Do(t, s.Addr, "DEL", key)
			harness.NothingLeft(t, s.Addr)
		}
		// Tokens go on from those of another source, as docs/guides/migration.md describes.
		harness.Do(t, s.Addr, "HSET", key, "token", "9007199254740990")
		nobodyLeads(t, c)
		term := campaign(t, c, "\x00\r\n'")
		require.EqualValues(t, 9007199254740991, term.Token())
		leads(t, c, term)
		harness.Do(t, s.Addr, "HSET", key, "token", "-5")
		_, err := c.Election(name).Leader(t.Context())
		require.ErrorContains(t, err, "token")
		harness.Do(t, s.Addr, "DEL", key)
		nobodyLeads(t, c)
		resign(t, term)
		harness.NothingLeft(t, s.Addr)
	})
}

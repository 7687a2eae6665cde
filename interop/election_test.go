package interop

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// The candidates of an election and the callers of the fair lock of its name in Java share one queue.
// Nobody leads while Java holds the lock.
func TestElectionBesideAFairLockOfJava(t *testing.T) {
	everywhere(t, func(t *testing.T, p *env) {
		java := javaSide{p.theirs(t)}
		q := fairQueue{p.conn(t), "scheduler of " + t.Name()}
		e := p.ours(t).Election(q.name)
		candidate := func() *harness.Call[*election.Term] {
			return harness.Start(t, t.Context(), func(ctx context.Context) (*election.Term, error) {
				return e.Campaign(ctx, "", lock.Wait(answers))
			})
		}
		nobodyLeads := func() {
			t.Helper()
			_, err := e.Leader(t.Context())
			require.ErrorIs(t, err, election.ErrNoLeader)
		}
		held := java.lock("fair", q.name)
		held.take(t, 1, 0, 0).gets(t, answers)
		nobodyLeads()
		first := candidate()
		q.joined(t, 1, "")
		between := q.join(t, java, "fair", forever)
		second := candidate()
		q.joined(t, 3, "")
		require.NoError(t, held.release(t, 1))

		term := first.Got()
		leader, err := e.Leader(t.Context())
		require.NoError(t, err)
		require.Equal(t, term.Owner(), leader.Owner)
		require.NoError(t, term.Resign(t.Context()))
		between.e.gets(t, answers)
		nobodyLeads()
		require.True(t, second.Running())
		require.NoError(t, between.release(t, between.thread))
		last := second.Got()
		require.Equal(t, term.Token()+1, last.Token())
		require.NoError(t, last.Resign(t.Context()))
	})
}

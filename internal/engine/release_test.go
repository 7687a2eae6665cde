package engine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// finding is a server on which a release finds that.
type finding struct {
	willing
	state ReleaseState
}

func (f finding) Release(context.Context, *Claim) (Release, error) {
	return Release{State: f.state}, nil
}

// A release that finds nothing may precede the acquisition, unless the server runs them in order.
func TestAReleaseThatFindsNothing(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		for _, state := range []ReleaseState{NotHeld, StillHeld, Free} {
			synctest.Test(t, func(t *testing.T) {
				l, s := newLock(finding{state: state}, ordered)
				defer s.Close()
				undone := l.releaseUnknown(Claim{Lease: time.Minute}, true)
				time.Sleep(10 * time.Second) // the further releases
				require.Equal(t, ordered || state != NotHeld, session.Await(undone))
			})
		}
	}
}

// extending is a server that has every claim.
type extending struct{ willing }

func (extending) Extend(context.Context, *Claim, time.Duration) (bool, error) { return true, nil }

// A waiter that has had the claim leaves the server's queue with the next check, of any kind.
func TestAWaiterLeavesWithTheNextCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, s := newLock(extending{}, true)
		defer s.Close()
		c := l.newClaim(t.Context(), &lock.Options{}, false)
		c.freshID()
		c.cohort = NewCohort(time.Now())
		c.cohort.leaves(s.NewOwner())
		held, err := c.checkOwnership(t.Context(), time.Now().Add(time.Second))
		require.NoError(t, err)
		require.True(t, held)
		passed, _ := c.cohort.left()
		require.Empty(t, passed)
	})
}

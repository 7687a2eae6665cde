package locking

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/session"
)

// finding is a server on which a release finds that.
type finding struct {
	willing
	state ReleaseState
}

func (f finding) Release(context.Context, *Claim) (Released, error) {
	return Released{State: f.state}, nil
}

// A release that finds nothing may precede the acquisition, unless the server runs them in order.
func TestAReleaseThatFindsNothing(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		for _, state := range []ReleaseState{NotHeld, StillHeld, Free} {
			synctest.Test(t, func(t *testing.T) {
				l, s := newLock(finding{state: state}, ordered)
				defer s.Close()
				undone := l.cleanUp(Claim{Lease: time.Minute}, true)
				time.Sleep(10 * time.Second) // the further releases
				require.Equal(t, ordered || state != NotHeld, session.Await(undone))
			})
		}
	}
}

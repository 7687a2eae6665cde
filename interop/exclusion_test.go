package interop

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// shortly is how long a timed attempt waits in vain.
const shortly = 50 * time.Millisecond

func TestSidesExcludeEachOther(t *testing.T) {
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				theirs := second.lock(rival(kind), name)
				held := first.lock(kind, name)
				held.take(t, 1, 0, 0).gets(t, answers)
				theirs.take(t, 1, 0, 0).fails(t, answers)
				began := time.Now()
				at := theirs.take(t, 1, shortly, 0).fails(t, answers)
				require.GreaterOrEqual(t, at.Sub(began), shortly-time.Millisecond)
				theirs.take(t, 1, shortly, time.Minute).fails(t, answers)
				require.True(t, held.locked(t))
				require.NoError(t, held.release(t, 1))
				// It waits: a waiter of a fair lock gives up its queue position just after it has
				// returned.
				theirs.take(t, 1, answers, 0).gets(t, answers)
				require.NoError(t, theirs.release(t, 1))
			})
		})
	})
}

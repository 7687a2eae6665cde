package interop

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
)

// Waiters of both languages share one queue, whatever the language of the holder, and Queue shows all of them. A
// waiter that leaves gives up its position, and the others keep theirs. Only a cancelled future in Java keeps its
// position, acquires the lock in its turn and releases it at once.
func TestFairOrderAcrossLanguages(t *testing.T) {
	harness.Full(t)
	const soon = 3 * time.Second // enough for all to join
	type departure int
	const (
		stays departure = iota
		gives           // cancelled when the waiter leaves
		cancelled
	)
	type waiter struct {
		side
		departure
		view
		thread uint64
		e      *entry
		owner  string
	}
	eachEnv(t, func(t *testing.T, p *env) {
		c := p.ours(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t)}
		p.eachKind(t, func(t *testing.T, kind, prefix string) {
			if !strings.HasSuffix(kind, "fair") {
				return
			}
			for _, first := range []side{named, java} {
				name := fmt.Sprint(prefix, first)
				queue := func(n int) (owners []string) {
					t.Helper()
					var waiters []fairlock.Waiter
					harness.Eventually(t, answers, fmt.Sprintf("%d wait", n), func() bool {
						var err error
						waiters, err = c.FairLock(name).Queue(t.Context())
						require.NoError(t, err)
						return len(waiters) == n
					})
					for _, w := range waiters {
						require.True(t, w.Deadline.After(time.Now()))
						owners = append(owners, w.Owner.String())
					}
					return owners
				}
				held := first.lock(kind, name)
				held.take(t, 1, 0, 0).gets(t, answers)

				all := []*waiter{
					{side: ours}, {side: java}, {side: java, departure: gives}, {side: java, departure: cancelled},
					{side: ours, departure: cancelled}, {side: named, departure: gives}, {side: java}, {side: named, departure: cancelled},
					{side: named}, {side: java, departure: gives}, {side: java},
				}
				var order []string // of those that keep their positions
				var line []*waiter
				for i, w := range all {
					wait := forever
					if w.departure == gives {
						wait = soon
					}
					w.view, w.thread = w.side.lock(kind, name), uint64(100+i)
					w.e = w.view.take(t, w.thread, wait, time.Minute)
					w.owner = queue(i + 1)[i]
					require.True(t, strings.HasPrefix(w.owner, w.side.id()), w.owner)
					if w.departure == stays || w.departure == cancelled && w.side == side(java) {
						order, line = append(order, w.owner), append(line, w)
					}
				}
				held.take(t, 7, 0, 0).fails(t, answers) // it does not queue
				for _, w := range all {
					if w.departure == gives {
						w.e.fails(t, soon+answers)
					} else if w.departure == cancelled {
						w.e.cancel()
						_, _, err := w.e.outcome(t, answers)
						require.ErrorIs(t, err, errCancelled)
					}
				}
				require.Equal(t, order, queue(len(order)))

				require.NoError(t, held.release(t, 1))
				for i, w := range line {
					if w.departure == cancelled {
						continue
					}
					w.e.gets(t, answers)
					for _, next := range line[i+1:] {
						require.False(t, next.departure == stays && next.e.ended(), "%d is overtaken", i)
					}
					require.NoError(t, w.view.release(t, w.thread))
				}
			}
		})
	})
}

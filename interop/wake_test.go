package interop

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
)

// prompt bounds the wake-up by a release: half of our polling interval. Java does not poll
// while the lease is long.
const prompt = safetyPoll / 2

// promptly fails the test unless the acquisition happened soon after began, and not before.
func promptly(t testing.TB, began, at time.Time) {
	t.Helper()
	require.False(t, at.Before(began), "it did not wait")
	require.LessOrEqual(t, at.Sub(began), prompt)
}

func TestReleaseWakesTheOtherSide(t *testing.T) {
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				for _, force := range []bool{false, true} {
					name := fmt.Sprint(name, force)
					held, theirs := first.lock(kind, name), second.lock(rival(kind), name)
					held.take(t, 1, 0, long).gets(t, answers)
					tried := p.watch(t, name)
					waiting := theirs.take(t, 1, forever, long)
					tried.asleep(t, second, 1)
					require.False(t, waiting.ended(), "it did not wait")
					began := time.Now()
					if force {
						require.True(t, held.force(t))
					} else {
						require.NoError(t, held.release(t, 1))
					}
					promptly(t, began, waiting.gets(t, answers))
					require.NoError(t, theirs.release(t, 1))
				}
			})
		})
	})
}

func TestWriterWakesAllReadersOfTheOtherSide(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			for _, how := range []string{"release", "force"} {
				t.Run(how, func(t *testing.T) {
					t.Parallel()
					name := "orders of " + t.Name()
					held, theirs := first.lock("write", name), second.lock("read", name)
					held.take(t, 1, 0, long).gets(t, answers)
					tried := p.watch(t, name)
					var waiting []*entry
					for thread := range uint64(5) {
						waiting = append(waiting, theirs.take(t, 1+thread, forever, long))
					}
					tried.asleep(t, second, 5)
					began := time.Now()
					if how == "force" {
						require.True(t, held.force(t))
					} else {
						require.NoError(t, held.release(t, 1))
					}
					for _, w := range waiting {
						promptly(t, began, w.gets(t, answers))
					}
					for thread := range uint64(5) {
						require.NoError(t, theirs.release(t, 1+thread))
					}
					require.False(t, held.locked(t))
				})
			}
		})
	})
}

// next returns the attempt that ends first.
func next(t testing.TB, waiting []*entry) int {
	t.Helper()
	i := -1
	harness.Eventually(t, answers, "one of them ends", func() bool {
		i = slices.IndexFunc(waiting, func(e *entry) bool { return e.ended() })
		return i >= 0
	})
	return i
}

// oursOf returns the redlatch client of the two sides.
func oursOf(first, second side) *redlatch.Client {
	if s, ok := first.(goSide); ok {
		return s.c
	}
	return second.(goSide).c
}

// theirsOf returns the Redisson client of the two sides.
func theirsOf(first, second side) *redisson {
	if s, ok := first.(javaSide); ok {
		return s.c
	}
	return second.(javaSide).c
}

// queued waits until n waiters queue for the fair lock, and returns them.
func queued(t testing.TB, c *redlatch.Client, name string, n int) (queue []fairlock.Waiter) {
	t.Helper()
	harness.Eventually(t, answers, strconv.Itoa(n)+" wait for "+name, func() bool {
		var err error
		queue, err = c.FairLock(name).Queue(context.Background())
		require.NoError(t, err)
		return len(queue) == n
	})
	return queue
}

func TestWaitersOfBothSidesAcquireInTurn(t *testing.T) {
	harness.Full(t)
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				if kind == "read" {
					return // they acquire it together
				}
				fair := strings.HasSuffix(kind, "fair")
				ours := oursOf(first, second)
				doors := []view{first.lock(kind, name), second.lock(kind, name)}
				doors[0].take(t, 9, 0, long).gets(t, answers)
				type thread struct {
					of     view
					number uint64
				}
				var threads []thread
				var waiting []*entry
				tried := p.watch(t, name, theirsOf(first, second).id)
				for number := range uint64(2) {
					for _, d := range doors {
						threads = append(threads, thread{d, 1 + number})
						waiting = append(waiting, d.take(t, 1+number, forever, long))
						if fair {
							queued(t, ours, name, len(waiting)) // in this order
						}
					}
				}
				tried.reach(t, 2*2) // from then on a release has to be heard
				holder := thread{doors[0], 9}
				for len(waiting) > 0 {
					if kind == "write" {
						// Redisson wakes all waiters of a process for one of them, and misses
						// messages while the others try.
						tried.quiet(t)
					}
					for _, w := range waiting {
						require.False(t, w.ended(), "the lock has two holders")
					}
					began := time.Now()
					require.NoError(t, holder.of.release(t, holder.number))
					i := next(t, waiting)
					if fair {
						require.Zero(t, i, "the first waiter")
					}
					promptly(t, began, waiting[i].gets(t, answers))
					holder = threads[i]
					waiting, threads = slices.Delete(waiting, i, i+1), slices.Delete(threads, i, i+1)
				}
				require.NoError(t, holder.of.release(t, holder.number))
				require.False(t, doors[1].locked(t))
			})
		})
	})
}

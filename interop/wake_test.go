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

// prompt is within what time a release is heard of: half the time after which we look by
// ourselves, and Java never does while the lease is long.
const prompt = safetyPoll / 2

// promptly fails the test unless what was released after began was had at that time,
// and not before.
func promptly(t testing.TB, began, at time.Time) {
	t.Helper()
	require.False(t, at.Before(began), "it did not wait")
	require.LessOrEqual(t, at.Sub(began), prompt)
}

func TestReleaseByOneWakesTheOther(t *testing.T) {
	eachPlace(t, nil, func(t *testing.T, p *place) {
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

func TestWriterOfOneWakesAllReadersOfTheOther(t *testing.T) {
	harness.Full(t)
	eachPlace(t, nil, func(t *testing.T, p *place) {
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

// next returns which of the attempts is the first to end.
func next(t testing.TB, waiting []*entry) int {
	t.Helper()
	i := -1
	harness.Eventually(t, answers, "one of them ends", func() bool {
		i = slices.IndexFunc(waiting, func(e *entry) bool { return e.ended() })
		return i >= 0
	})
	return i
}

// oursOf returns the client of the side that is ours.
func oursOf(first, second side) *redlatch.Client {
	if s, ok := first.(goSide); ok {
		return s.c
	}
	return second.(goSide).c
}

// theirsOf returns the client of the side that is theirs.
func theirsOf(first, second side) *redisson {
	if s, ok := first.(javaSide); ok {
		return s.c
	}
	return second.(javaSide).c
}

// queued waits until so many wait for the fair lock, and returns them.
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

func TestWaitersOfBothGetInOneByOne(t *testing.T) {
	harness.Full(t)
	eachPlace(t, nil, func(t *testing.T, p *place) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			p.eachKind(t, func(t *testing.T, kind, name string) {
				if kind == "read" {
					return // they get in together
				}
				fair := strings.HasSuffix(kind, "fair")
				ours := oursOf(first, second)
				doors := []door{first.lock(kind, name), second.lock(kind, name)}
				doors[0].take(t, 9, 0, long).gets(t, answers)
				type thread struct {
					of     door
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
				tried.reach(t, 2*2) // after that, a release has to be heard of
				holder := thread{doors[0], 9}
				for len(waiting) > 0 {
					if kind == "write" {
						// Redisson wakes all of a process for one of them, and misses what is told
						// while the others try.
						tried.quiet(t)
					}
					for _, w := range waiting {
						require.False(t, w.ended(), "two have the lock")
					}
					began := time.Now()
					require.NoError(t, holder.of.release(t, holder.number))
					i := next(t, waiting)
					if fair {
						require.Zero(t, i, "the one that came first")
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

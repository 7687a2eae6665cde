package engine_test

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
)

func TestARequestEndsInTimeForAllOfItsHolds(t *testing.T) {
	first, second := time.Now().Add(time.Second), time.Now().Add(time.Minute)
	r := engine.NewCohort(time.Now())
	b := r.Enqueue(second)
	require.NoError(t, r.Release(first, func(by time.Time) error {
		require.Equal(t, first, by)
		return nil
	}))
	r.Enqueue(first)
	require.NoError(t, r.Confirm(r.Enqueue(second), func(by time.Time) error {
		require.Equal(t, first, by)
		return nil
	}))
	require.NoError(t, r.Confirm(b, nil))
}

// slow is a request that is under way until it is answered.
type slow struct {
	sent   chan struct{}
	answer chan error
}

func newSlow() slow { return slow{make(chan struct{}), make(chan error)} }

func (s slow) ask(time.Time) error {
	close(s.sent)
	return <-s.answer
}

func TestOneRequestAnswersForAllWhoPassedOnBefore(t *testing.T) {
	r := engine.NewCohort(time.Now())
	first, second := newSlow(), newSlow()
	results := make(chan error, 3)
	confirm := func(l *engine.Batch, ask func(time.Time) error) { go func() { results <- r.Confirm(l, ask) }() }
	confirm(r.Enqueue(time.Time{}), first.ask)
	<-first.sent
	a, b := r.Enqueue(time.Time{}), r.Enqueue(time.Time{})
	confirm(a, second.ask)
	first.answer <- nil
	require.NoError(t, <-results)
	<-second.sent
	confirm(b, func(time.Time) error { panic("b has joined before the second was sent") })
	gone := &lock.LostError{}
	second.answer <- gone
	require.Equal(t, error(gone), <-results)
	require.Equal(t, error(gone), <-results)
	require.True(t, r.Gone())
	_, ok := r.Valid()
	require.False(t, ok)
}

// TestCohorts has claims run through many hands: what answers for a hand has begun after it
// joined, the end comes once and last, and nobody waits for ever.
func TestCohorts(t *testing.T) {
	for range 200 {
		r := engine.NewCohort(time.Now())
		var (
			requests atomic.Int64 // the number of the latest
			over     atomic.Bool
			running  atomic.Int64
			wg       sync.WaitGroup
		)
		ask := func(by time.Time) error {
			assert.Equal(t, int64(1), running.Add(1), "one at a time")
			assert.False(t, over.Load(), "after the end")
			requests.Add(1)
			if rand.N(2) == 0 {
				time.Sleep(rand.N(50 * time.Microsecond))
			}
			running.Add(-1)
			return nil
		}
		baton := make(chan int, 1)
		baton <- 1 + rand.N(30) // how many are to have it
		for range 30 {
			wg.Go(func() {
				left := <-baton
				switch {
				case left == 0: // it is over
				case left == 1:
					assert.NoError(t, r.Release(time.Time{}, func(by time.Time) error {
						err := ask(by)
						over.Store(true)
						return err
					}))
				default:
					before := requests.Load()
					l := r.Enqueue(time.Time{})
					if rand.N(4) == 0 { // the heir had left
						l = r.Enqueue(time.Time{})
					}
					baton <- left - 1
					assert.NoError(t, r.Confirm(l, ask))
					assert.Greater(t, requests.Load(), before)
					return
				}
				baton <- 0
			})
		}
		wg.Wait()
		require.True(t, over.Load())
	}
}

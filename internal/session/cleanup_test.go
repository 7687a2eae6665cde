package session

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// bare returns a session without a connection.
func bare() *Session {
	s := &Session{cleanups: cleanups{wake: make(chan struct{}, 1)}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.stopCtx, s.stop = context.WithCancel(s.ctx)
	return s
}

// end closes a bare session.
func (s *Session) end() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.tasks.Wait()
}

func TestCleanUpRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bare()
		defer s.end()
		began := time.Now()
		var at []time.Duration
		s.CleanUp(time.Minute, func(context.Context) (time.Duration, error) {
			at = append(at, time.Since(began))
			return time.Duration(3-len(at)) * time.Second, nil // negative after the third
		})
		var last time.Duration
		s.CleanUp(10*time.Second, func(ctx context.Context) (time.Duration, error) {
			last = time.Since(began)
			return 3 * time.Second, nil
		})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []time.Duration{0, 2 * time.Second, 3 * time.Second, 3 * time.Second}, at)
		require.Equal(t, 9*time.Second, last, "10 s later it is over")
		require.Zero(t, s.Running())
	})
}

func TestCleanUpsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bare()
		defer s.end()
		var running, most, ran atomic.Int32
		const n = maxCleanups + 3*cleanupsAtOnce
		for range n {
			s.CleanUp(time.Hour, func(context.Context) (time.Duration, error) {
				most.Store(max(most.Load(), running.Add(1)))
				time.Sleep(time.Second)
				running.Add(-1)
				ran.Add(1)
				return -1, nil
			})
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		require.LessOrEqual(t, most.Load(), int32(cleanupsAtOnce))
		require.GreaterOrEqual(t, ran.Load(), int32(maxCleanups))
		require.Less(t, ran.Load(), int32(n), "the oldest are dropped")
		require.Zero(t, s.Running())
	})
}

// When too many are pending, those are dropped first that have run, and are repeated only in case a request
// arrives late. They delay none that has not run.
func TestRepeatedCleanUpsAreDroppedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bare()
		defer s.end()
		const latency = 100 * time.Millisecond
		var repeated, ran, latest atomic.Int64
		for range maxCleanups {
			once := false
			s.CleanUp(time.Hour, func(context.Context) (time.Duration, error) {
				time.Sleep(latency)
				if once {
					repeated.Add(1)
					return -1, nil
				}
				once = true
				return 30 * time.Second, nil
			})
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		began := time.Now()
		for range maxCleanups / 2 {
			s.CleanUp(time.Hour, func(context.Context) (time.Duration, error) {
				time.Sleep(latency)
				ran.Add(1)
				latest.Store(int64(time.Since(began)))
				return -1, nil
			})
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, maxCleanups/2, ran.Load(), "none is dropped")
		require.Less(t, repeated.Load(), int64(maxCleanups*6/10))
		require.Less(t, time.Duration(latest.Load()), 2*time.Second, "as many at a time as a far server needs")
		require.Zero(t, s.Running())
	})
}

// When the session closes, those under way are interrupted, and all that are left run once.
func TestCleanUpWhileClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bare()
		var interrupted, late, after bool
		s.CleanUp(time.Minute, func(ctx context.Context) (time.Duration, error) {
			if !interrupted {
				<-ctx.Done()
				interrupted = true
			} else {
				late = ctx.Err() == nil
			}
			return time.Second, nil
		})
		runs := 0
		s.CleanUp(time.Minute, func(context.Context) (time.Duration, error) { runs++; return 30 * time.Second, nil })
		synctest.Wait()
		s.end()
		require.True(t, interrupted)
		require.True(t, late)
		require.Equal(t, 2, runs)
		s.CleanUp(time.Minute, func(context.Context) (time.Duration, error) { after = true; return time.Second, nil })
		require.True(t, after)
		require.Zero(t, s.Running())
	})
}

func never(error) bool { return false }

// Retry ends when it has to, even if requests last.
func TestRetryEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bare()
		s.client = new(wire.Client)
		const patience = 5 * time.Second
		began, n := time.Now(), 0
		err := s.Retry(t.Context(), began.Add(patience), func(ctx context.Context) error {
			n++
			<-ctx.Done()
			return ctx.Err()
		}, never)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, patience, time.Since(began))
		require.Equal(t, 1, n)

		began, n = time.Now(), 0
		failed := errors.New("failed")
		require.Equal(t, failed, s.Retry(t.Context(), time.Time{}, func(context.Context) error {
			n++
			return failed
		}, never))
		require.Equal(t, 1, n)
		require.Zero(t, time.Since(began))
		s.end()
	})
}

// Each attempt has time for an answer: the last one, too.
func TestRetryLeavesTimeForTheLastAttempt(t *testing.T) {
	for over := range 200 {
		synctest.Test(t, func(t *testing.T) {
			s := bare()
			defer s.end()
			s.client = new(wire.Client)
			failed, left := errors.New("failed"), time.Hour
			patience := 4*time.Second + time.Duration(over)*10*time.Millisecond
			require.Equal(t, failed, s.Retry(t.Context(), time.Now().Add(patience), func(ctx context.Context) error {
				by, ok := ctx.Deadline()
				require.True(t, ok)
				left = min(left, time.Until(by))
				return failed
			}, never))
			require.GreaterOrEqual(t, left, leastAttempt)
		})
	}
}

// When the session closes, requests have a moment left, and none after a Shutdown that was not in time.
func TestRequestsEndWithTheSession(t *testing.T) {
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := bare()
			s.client = new(wire.Client)
			silent := func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			}
			s.CleanUp(time.Hour, func(ctx context.Context) (time.Duration, error) { return 0, silent(ctx) })
			s.Go(func(context.Context) {
				_ = s.Retry(context.Background(), time.Now().Add(time.Hour), func(ctx context.Context) error {
					if s.Err() != nil {
						return silent(ctx)
					}
					return errors.New("again")
				}, never)
			})
			synctest.Wait()
			began := time.Now()
			if late {
				s.shutBy.Store(&began)
			}
			s.end()
			if late {
				require.Zero(t, time.Since(began))
			} else {
				require.LessOrEqual(t, time.Since(began), 2*lastCleanup)
				require.GreaterOrEqual(t, time.Since(began), lastCleanup)
			}
		})
	}
}

// What a call undoes goes on in the background when its context has ended.
func TestUndoGoesOnInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const long = time.Minute
		s := bare()
		ctx, cancel := context.WithCancel(t.Context())
		for _, after := range []time.Duration{long, time.Second, 0} {
			time.AfterFunc(after, cancel)
			if after == 0 {
				cancel()
			}
			began, undone := time.Now(), make(chan struct{})
			err := s.Undo(ctx, long/2, func() error {
				time.Sleep(long)
				close(undone)
				return nil
			})
			require.ErrorIs(t, err, lock.ErrIndeterminate)
			require.Equal(t, min(after+Grace, long/2), time.Since(began))
			<-undone
			ctx, cancel = context.WithCancel(t.Context())
		}
		failed := errors.New("failed")
		require.Equal(t, failed, s.Undo(ctx, long, func() error { return failed }))
		cancel()
		s.end()
		require.Equal(t, failed, s.Undo(ctx, long, func() error { return failed }))
	})
}

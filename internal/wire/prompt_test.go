package wire

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// silent is a connection that heeds no context. It replies when answer is closed, or if it is nil.
type silent struct {
	rueidis.Client
	answer  chan struct{}
	far     time.Duration // the time of a round trip
	mode    rueidis.ClientMode
	sent    atomic.Int32
	batches atomic.Int32 // in which they were sent
	unknown atomic.Int32 // requests whose caller had left when they could have been sent
}

func (s *silent) Mode() rueidis.ClientMode { return s.mode }

func (s *silent) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	return s.DoMulti(ctx, cmd)[0]
}

func (s *silent) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	n := int32(len(cmds))
	s.sent.Add(n)
	s.batches.Add(1)
	time.Sleep(s.far)
	if s.answer != nil {
		<-s.answer
		if ctx.Err() != nil {
			s.unknown.Add(n)
		}
	}
	return make([]rueidis.RedisResult, n)
}

// do makes n requests with that time, and returns their errors.
func do(t *testing.T, p *Prompt, n int, timeout time.Duration) <-chan error {
	t.Helper()
	errs := make(chan error, n)
	for i := range n {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			if i%2 == 0 {
				errs <- p.Do(ctx, rueidis.Completed{}).Error()
			} else {
				errs <- p.DoMulti(ctx, rueidis.Completed{})[0].Error()
			}
		}()
	}
	return errs
}

// Callers leave a silent server when their contexts end, wherever their requests are. When it has been
// silent for a while few more are sent, and the others are not. When it answers again, all are.
func TestPromptLeavesASilentServer(t *testing.T) {
	for _, link := range []*Link{nil, NewLink(time.Second)} {
		synctest.Test(t, func(t *testing.T) {
			const timeout, n = 300 * time.Millisecond, maxInFlight - 2*maxHeld
			conn := &silent{}
			p := NewPrompt(conn, link)
			require.False(t, p.Answers())
			require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error())
			require.True(t, p.Answers())
			conn.answer = make(chan struct{})

			leave := func() (unsent int) {
				begin := time.Now()
				errs := do(t, p, n, timeout)
				for range n {
					err := <-errs
					require.ErrorIs(t, err, context.DeadlineExceeded)
					if OutcomeOf(err) == Passing {
						require.Equal(t, lock.ErrUnavailable, KindOf(err), "others need not hold the lock")
						unsent++
					}
				}
				require.Equal(t, timeout, time.Since(begin))
				return unsent
			}
			require.Zero(t, leave())
			require.Equal(t, n-maxHeld, leave())

			close(conn.answer)
			synctest.Wait()
			require.True(t, p.Answers())
			errs := do(t, p, n, timeout)
			for range n {
				require.NoError(t, <-errs)
			}
		})
	}
}

// Nothing waits in the connection for room, since callers could not leave.
func TestPromptLimitsRequestsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = quiet / 2
		conn := &silent{answer: make(chan struct{})}
		p := NewPrompt(conn, nil)
		begin := time.Now()
		errs := do(t, p, 3*maxInFlight, timeout)
		for range 3 * maxInFlight {
			require.ErrorIs(t, <-errs, context.DeadlineExceeded)
		}
		require.Equal(t, timeout, time.Since(begin))
		require.EqualValues(t, maxInFlight, conn.batches.Load())
		close(conn.answer)
	})
}

// A server that is far away is not silent: nothing is held back.
func TestManyCallersOfAFarServer(t *testing.T) {
	for _, mode := range []rueidis.ClientMode{rueidis.ClientModeStandalone, rueidis.ClientModeCluster} {
		synctest.Test(t, func(t *testing.T) {
			const far, n = 100 * time.Millisecond, 5000
			conn := &silent{far: far, mode: mode}
			p := NewPrompt(conn, NewLink(time.Second))
			require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error())
			time.Sleep(time.Minute)
			for i := range 3 {
				errs := make(chan error, n)
				for range n {
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), 3*far)
						defer cancel()
						errs <- p.Do(ctx, rueidis.Completed{}).Error()
					}()
				}
				for range n {
					require.NoError(t, <-errs, i)
				}
			}
		})
	}
}

// The outcome of a request whose context ends while it is held back is known.
func TestARequestThatIsNotSentInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{}
		p := NewPrompt(conn, NewLink(time.Second))
		require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error())
		conn.answer = make(chan struct{})
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.True(t, NotSent(ended, p.Do(ended, rueidis.Completed{}).Error()))
		for range maxHeld + 1 {
			go p.Do(t.Context(), rueidis.Completed{})
			time.Sleep(2 * quiet)
		}
		ctx, cancel := context.WithTimeout(t.Context(), quiet)
		err := p.Do(ctx, rueidis.Completed{}).Error()
		cancel()
		require.Equal(t, lock.ErrUnavailable, KindOf(err), "%v", err)
		require.False(t, NotSent(ctx, err))
		close(conn.answer)
	})
}

// A caller whose context cannot end waits in the connection.
func TestPromptWaitsForACallerThatDoesNotLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{answer: make(chan struct{})}
		p := NewPrompt(conn, NewLink(time.Second))
		for range 2 * maxHeld {
			go p.Do(context.Background(), rueidis.Completed{})
		}
		synctest.Wait()
		require.EqualValues(t, 2*maxHeld, conn.sent.Load())
		close(conn.answer)
	})
}

// In a cluster a node that answers says nothing about the others.
func TestPromptKnowsNodesApart(t *testing.T) {
	p := NewPrompt(&silent{mode: rueidis.ClientModeCluster}, NewLink(time.Second))
	require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error()) // slot 0
	require.True(t, p.routes[0].answers())
	require.False(t, p.routes[1].answers())
	require.False(t, p.Answers())
}

// Requests beside many others are sent together. Each caller gets its own reply, or leaves when its
// context ends.
func TestManyRequestsAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{}
		p := NewPrompt(conn, nil)
		require.NoError(t, <-do(t, p, 1, time.Minute))
		conn.answer = make(chan struct{})
		conn.sent.Store(0)
		conn.batches.Store(0)
		sent := func(requests, batches int, why string) {
			t.Helper()
			synctest.Wait()
			require.EqualValues(t, requests, conn.sent.Load(), why)
			require.EqualValues(t, batches, conn.batches.Load(), why)
		}
		var errs []<-chan error
		start := func(n int) {
			for range n {
				errs = append(errs, do(t, p, 1, time.Minute))
				synctest.Wait()
			}
		}
		const alone, more = manyInFlight - 1, 10
		start(alone)
		sent(alone, alone, "few are sent at once")

		next := new(gathered) // as if other goroutines were still to run before it is sent
		p.gathering.next = next
		start(more)
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() { left <- p.Do(ctx, rueidis.Completed{}).Error() }()
		sent(alone, alone, "the others are not")
		go p.gathering.send(next)
		sent(alone+more+1, alone+1, "they are sent together")
		cancel()
		err := <-left
		require.ErrorIs(t, err, context.Canceled)
		require.False(t, NotSent(ctx, err))

		start(1)
		sent(alone+more+2, alone+2, "the next batch does not wait for a reply")
		close(conn.answer)
		for _, err := range errs {
			require.NoError(t, <-err)
		}
		require.Nil(t, p.gathering.next)
	})
}

// A batch has the requests of all callers that could run when the first of them was made.
func TestABatchWaitsForRunnableCallers(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{answer: make(chan struct{})}
		p := NewPrompt(conn, nil)
		const callers = 30
		for range callers {
			go p.gathering.do(context.Background(), rueidis.Completed{}, nil)
		}
		synctest.Wait()
		require.EqualValues(t, callers, conn.sent.Load())
		require.Less(t, conn.batches.Load(), int32(callers/3), "now and then the scheduler runs another goroutine first")
		close(conn.answer)
	})
}

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
)

// silent is a connection that heeds no context. It replies when that is closed, or if it is nil.
type silent struct {
	rueidis.Client
	answer  chan struct{}
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

// Callers leave a silent server when their contexts end. Few requests are under way then, and the
// others were not sent. When the server answers again, requests are not limited.
func TestPromptLeavesASilentServer(t *testing.T) {
	for _, idle := range []time.Duration{0, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			const timeout, n = 300 * time.Millisecond, 3 * maxInFlight
			conn := &silent{}
			p := NewPrompt(conn, NewLink(time.Second))
			require.False(t, p.Answers())
			require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error())
			require.True(t, p.Answers())
			conn.answer = make(chan struct{})
			conn.sent.Store(0)
			time.Sleep(idle + fresh)

			begin := time.Now()
			errs := do(t, p, n, timeout)
			unsent := 0
			for range n {
				err := <-errs
				require.ErrorIs(t, err, context.DeadlineExceeded)
				if OutcomeOf(err) == Passing {
					unsent++
				}
			}
			require.Equal(t, timeout, time.Since(begin))
			require.Equal(t, n-maxApart, unsent)
			require.EqualValues(t, maxApart, conn.sent.Load())

			close(conn.answer)
			synctest.Wait()
			require.True(t, p.Answers())
			require.EqualValues(t, conn.sent.Load(), conn.unknown.Load(), "rueidis can tell that nobody waits")
			errs = do(t, p, n, timeout)
			for range n {
				require.NoError(t, <-errs)
			}
		})
	}
}

// A request that was not sent says nothing of a server that has answered a moment ago.
func TestARequestThatIsNotSentInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{}
		p := NewPrompt(conn, NewLink(time.Second))
		require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error())
		conn.answer = make(chan struct{})
		time.Sleep(fresh)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.True(t, NotSent(ended, p.Do(ended, rueidis.Completed{}).Error()))
		for range maxApart {
			go p.Do(t.Context(), rueidis.Completed{})
		}
		synctest.Wait()
		for _, wait := range []time.Duration{alive / 2, alive} {
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			err := p.Do(ctx, rueidis.Completed{}).Error()
			cancel()
			require.Equal(t, Passing, OutcomeOf(err))
			require.Equal(t, wait < alive, NotSent(ctx, err), "%v", err)
			require.False(t, NotSent(t.Context(), err))
		}
		close(conn.answer)
	})
}

// While the server answers, callers wait in the connection, but for no more requests than that
// takes.
func TestPromptLimitsRequestsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{}
		p := NewPrompt(conn, NewLink(time.Second))
		require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error())
		conn.answer = make(chan struct{})
		conn.sent.Store(0)
		errs := do(t, p, 2*maxInFlight, time.Minute)
		synctest.Wait()
		require.EqualValues(t, maxInFlight+maxApart, conn.sent.Load())
		close(conn.answer)
		for range 2 * maxInFlight {
			require.NoError(t, <-errs)
		}
	})
}

// A caller whose context cannot end waits in the connection.
func TestPromptWaitsForACallerThatDoesNotLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{answer: make(chan struct{})}
		p := NewPrompt(conn, NewLink(time.Second))
		for range 2 * maxApart {
			go p.Do(context.Background(), rueidis.Completed{})
		}
		synctest.Wait()
		require.EqualValues(t, 2*maxApart, conn.sent.Load())
		close(conn.answer)
	})
}

// In a cluster a node that answers says nothing about the others.
func TestPromptKnowsNodesApart(t *testing.T) {
	p := NewPrompt(&silent{mode: rueidis.ClientModeCluster}, NewLink(time.Second))
	require.NoError(t, p.Do(t.Context(), rueidis.Completed{}).Error()) // slot 0
	require.True(t, p.routes[0].answers(fresh))
	require.False(t, p.routes[1].answers(fresh))
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
			go p.gathering.do(context.Background(), rueidis.Completed{})
		}
		synctest.Wait()
		require.EqualValues(t, callers, conn.sent.Load())
		require.Less(t, conn.batches.Load(), int32(callers/3), "now and then the scheduler runs another goroutine first")
		close(conn.answer)
	})
}

package wire

import (
	"context"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
)

// silent is a connection that sends a request when connected is closed, unless its context has an error
// then, and replies when answer is closed. Both are closed if they are nil.
type silent struct {
	rueidis.Client
	connected, answer chan struct{}
	mode              rueidis.ClientMode
	sent, batches     atomic.Int32  // requests, and how often some were sent
	lost              atomic.Int32  // how often the connection is given up before the next are sent
	far               time.Duration // how long a reply takes
}

func (s *silent) Mode() rueidis.ClientMode { return s.mode }

func (s *silent) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	return s.DoMulti(ctx, cmd)[0]
}

func (s *silent) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	if s.connected != nil {
		<-s.connected
	}
	err := ctx.Err()
	if err == nil && s.lost.Add(-1) >= 0 {
		err = errGivenUp
	}
	if err != nil {
		return slices.Repeat([]rueidis.RedisResult{rueidis.NewErrorResult(err)}, len(cmds))
	}
	s.sent.Add(int32(len(cmds)))
	s.batches.Add(1)
	if s.answer != nil {
		<-s.answer
	}
	time.Sleep(s.far)
	return make([]rueidis.RedisResult, len(cmds))
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

// Callers leave a silent server when their contexts end. When the server answers again, requests are
// not limited.
func TestPromptLeavesASilentServer(t *testing.T) {
	for _, idle := range []time.Duration{0, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			const timeout, n = 300 * time.Millisecond, 4 * maxApart
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
			require.Equal(t, n-int(conn.sent.Load()), unsent)
			require.GreaterOrEqual(t, unsent, n/2-maxApart)

			close(conn.answer)
			synctest.Wait()
			require.True(t, p.Answers())
			errs = do(t, p, n, timeout)
			for range n {
				require.NoError(t, <-errs)
			}
		})
	}
}

// Few batches are sent to a server that does not answer. Callers that leave meanwhile know that theirs
// were not, and those that stay have theirs sent together when the server answers.
func TestASilentServerGetsFewBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const leave, stay = 10, 20
		conn := &silent{answer: make(chan struct{})}
		p := NewPrompt(conn, nil)
		waiting := func(n int, timeout time.Duration) (errs []<-chan error) {
			for range n {
				errs = append(errs, do(t, p, 1, timeout))
				synctest.Wait()
			}
			return errs
		}
		sent := waiting(maxBatches, time.Minute)
		early := waiting(leave, quiet/2)
		leaving := waiting(leave, time.Second)
		staying := waiting(stay, time.Minute)
		require.EqualValues(t, maxBatches, conn.sent.Load())
		for _, err := range early {
			require.ErrorIs(t, <-err, errNotSent, "it says nothing of the server")
		}
		for _, err := range leaving {
			err := <-err
			require.ErrorIs(t, err, errSilent)
			require.Equal(t, Passing, OutcomeOf(err))
		}
		close(conn.answer)
		for _, err := range append(sent, staying...) {
			require.NoError(t, <-err)
		}
		require.EqualValues(t, maxBatches+stay, conn.sent.Load())
		require.EqualValues(t, maxBatches+1, conn.batches.Load())
	})
}

// A request is not sent after its caller has left, neither when the connection is there, nor when the
// request has to be sent again. The others of its batch are.
func TestARequestIsNotSentAfterItsCallerHasLeft(t *testing.T) {
	for _, lost := range []int32{0, 2} {
		synctest.Test(t, func(t *testing.T) {
			const leave, stay = 10, 20
			conn := &silent{connected: make(chan struct{})}
			conn.lost.Store(lost)
			p := NewPrompt(conn, nil)
			call := func(n int, timeout time.Duration) <-chan error {
				errs := make(chan error, n)
				for range n {
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), timeout)
						defer cancel()
						errs <- p.Do(ctx, rueidis.Completed{}).Error()
					}()
				}
				return errs
			}
			leaving, staying := call(leave, time.Second), call(stay, time.Minute)
			for range leave {
				err := <-leaving
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, Passing, OutcomeOf(err))
			}
			close(conn.connected)
			for range stay {
				require.NoError(t, <-staying)
			}
			require.EqualValues(t, stay, conn.sent.Load())
		})
	}
}

// A server that is far away takes more requests than a connection does.
func TestManyCallersOfAFarServer(t *testing.T) {
	for _, mode := range []rueidis.ClientMode{rueidis.ClientModeStandalone, rueidis.ClientModeCluster} {
		synctest.Test(t, func(t *testing.T) {
			conn := &silent{far: 100 * time.Millisecond, mode: mode}
			p := NewPrompt(conn, NewLink(time.Second))
			n := 10 * 1024
			if mode == rueidis.ClientModeCluster {
				n = 8 * maxApart
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			errs := make(chan error, n)
			for range n {
				go func() { errs <- p.Do(ctx, rueidis.Completed{}).Error() }()
			}
			for range n {
				require.NoError(t, <-errs)
			}
		})
	}
}

// A caller whose context had ended before it called sends nothing.
func TestARequestThatIsNotSentInTime(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	p := NewPrompt(&silent{}, NewLink(time.Second))
	require.True(t, NotSent(ended, p.Do(ended, rueidis.Completed{}).Error()))
	require.True(t, NotSent(ended, p.DoMulti(ended, rueidis.Completed{})[0].Error()))
	require.False(t, NotSent(t.Context(), p.Do(ended, rueidis.Completed{}).Error()))
}

// A caller whose context cannot end waits in the connection.
func TestPromptWaitsForACallerThatDoesNotLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{answer: make(chan struct{})}
		p := NewPrompt(conn, NewLink(time.Second))
		const callers = manyInFlight - 1 + maxBatches // the last may be in a batch each
		for range callers {
			go p.Do(context.Background(), rueidis.Completed{})
		}
		synctest.Wait()
		require.EqualValues(t, callers, conn.sent.Load())
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

		next := &batch{unwatched: newUnwatched(t.Context()), g: &p.gathering} // as if other goroutines were still to run before it is sent
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

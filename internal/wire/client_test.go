package wire

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
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
	redialed          atomic.Int32  // how often the connection is closed before the next are sent
	far               time.Duration // how long a reply takes

	failed          sync.Map     // the memory of the commands that were not sent
	again, recycled atomic.Int32 // commands sent that are among them, and those that rueidis recycles
}

// command returns a command as callers build them.
func command() rueidis.Completed { return new(rueidis.Builder).Ping().Build() }

// memory returns the address of a command's memory, and whether rueidis recycles it.
func memory(cmd rueidis.Completed) (at uintptr, recycled bool) {
	cs := reflect.ValueOf(cmd).FieldByName("cs")
	return cs.Pointer(), cs.Elem().FieldByName("r").Int() == 0
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
	if err == nil && s.redialed.Add(-1) >= 0 {
		err = errRedialed
	}
	if err != nil {
		for _, cmd := range cmds {
			at, _ := memory(cmd)
			s.failed.Store(at, true)
		}
		return slices.Repeat([]rueidis.RedisResult{rueidis.NewErrorResult(err)}, len(cmds))
	}
	for _, cmd := range cmds {
		at, recycled := memory(cmd)
		if _, again := s.failed.Load(at); again {
			s.again.Add(1)
			if recycled {
				s.recycled.Add(1)
			}
		}
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
func do(t *testing.T, c *Client, n int, timeout time.Duration) <-chan error {
	t.Helper()
	errs := make(chan error, n)
	for i := range n {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			if i%2 == 0 {
				errs <- c.Do(ctx, command()).Error()
			} else {
				errs <- c.DoMulti(ctx, command())[0].Error()
			}
		}()
	}
	return errs
}

// Callers leave a silent server when their contexts end. Few batches are sent to it. Callers that leave
// before theirs are sent know that, and those that stay have theirs sent together when the server answers.
func TestCallersLeaveASilentServer(t *testing.T) {
	for _, mode := range []rueidis.ClientMode{rueidis.ClientModeStandalone, rueidis.ClientModeCluster} {
		synctest.Test(t, func(t *testing.T) {
			const leave, stay, timeout = 10, 20, 300 * time.Millisecond
			conn := &silent{answer: make(chan struct{}), mode: mode}
			c := NewClient(conn, nil, 0)
			most := cap(c.queues[0].room)

			sent := make(chan error, most)
			for range most { // one after the other, so that each is in a batch of its own
				err := do(t, c, 1, timeout)
				synctest.Wait()
				go func() { sent <- <-err }()
			}
			early := do(t, c, leave, quiet/2)
			late := do(t, c, leave, timeout)
			staying := do(t, c, stay, time.Minute)
			synctest.Wait()
			require.EqualValues(t, most, conn.sent.Load())
			require.False(t, c.Answers())

			began := time.Now()
			for range leave {
				require.ErrorIs(t, <-early, errNotSent, "it says nothing of the server")
			}
			require.Equal(t, quiet/2, time.Since(began))
			for range leave {
				err := <-late
				require.ErrorIs(t, err, errSilent)
				require.Equal(t, Passing, OutcomeOf(err))
			}
			for range most {
				err := <-sent
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, Unknown, OutcomeOf(err))
			}
			require.Equal(t, timeout, time.Since(began))

			close(conn.answer)
			for range stay {
				require.NoError(t, <-staying)
			}
			require.EqualValues(t, most+stay, conn.sent.Load())
			if mode == rueidis.ClientModeStandalone {
				require.EqualValues(t, most+1, conn.batches.Load())
				require.True(t, c.Answers())
			}
		})
	}
}

// A request is not sent after its caller has left, neither when the connection is there, nor when the
// request has to be sent again. The others of its batch are.
func TestARequestIsNotSentAfterItsCallerHasLeft(t *testing.T) {
	for _, redialed := range []int32{0, 2} {
		synctest.Test(t, func(t *testing.T) {
			const leave, stay = 10, 20
			conn := &silent{connected: make(chan struct{})}
			conn.redialed.Store(redialed)
			c := NewClient(conn, nil, 0)
			leaving, staying := do(t, c, leave, time.Second), do(t, c, stay, time.Minute)
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

			conn.redialed.Store(redialed)
			require.NoError(t, c.Do(context.Background(), command()).Error())
			require.Zero(t, conn.recycled.Load(), "rueidis may still be writing what it has seen before")
			require.GreaterOrEqual(t, conn.again.Load(), redialed)
		})
	}
}

// Callers that leave before a server that is well has answered are told that, and not that it does not answer.
func TestCallersWithLittleTime(t *testing.T) {
	const far = 10 * time.Millisecond
	for timeout := time.Millisecond; timeout < far; timeout += time.Millisecond {
		synctest.Test(t, func(t *testing.T) {
			c := NewClient(&silent{far: far}, nil, 0)
			for range 3 {
				err := <-do(t, c, 1, timeout)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.EqualError(t, err, fmt.Sprintf(
					"the wait ended %v after the request was sent, before the answer: context deadline exceeded", timeout))
				require.Equal(t, Unknown, OutcomeOf(err))
				time.Sleep(2 * quiet)
			}
		})
	}
}

// Requests that were not sent say nothing of the server, however long ago they were.
func TestRequestsThatWereNotSentNeedNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{}
		c := NewClient(conn, nil, 0)
		for range 3 {
			conn.connected = make(chan struct{})
			require.ErrorIs(t, <-do(t, c, 1, 5*time.Millisecond), errNotSent)
			close(conn.connected)
			time.Sleep(2 * quiet)
			synctest.Wait()
		}
		require.Zero(t, conn.sent.Load())
	})
}

// A batch is sent although callers keep coming.
func TestABatchDoesNotWaitForAllThatCome(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	conn := &silent{}
	c := NewClient(conn, nil, 0)
	errs := do(t, c, 1, time.Minute)
	came := 0
	for ; conn.sent.Load() == 0 && came < maxBatch; came++ {
		do(t, c, 1, time.Minute)
		runtime.Gosched()
	}
	require.NoError(t, <-errs)
	require.LessOrEqual(t, came, 2*maxGathers)
}

// A server that is far away takes more requests than a connection does.
func TestManyCallersOfAFarServer(t *testing.T) {
	for mode, n := range map[rueidis.ClientMode]int{
		rueidis.ClientModeStandalone: 10 * 1024,
		rueidis.ClientModeCluster:    8 * clusterBatches,
	} {
		synctest.Test(t, func(t *testing.T) {
			errs := do(t, NewClient(&silent{far: 100 * time.Millisecond, mode: mode}, nil, 0), n, time.Second)
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
	c := NewClient(&silent{}, nil, 0)
	require.True(t, NotSent(ended, c.Do(ended, command()).Error()))
	require.True(t, NotSent(ended, c.DoMulti(ended, command())[0].Error()))
	require.False(t, NotSent(t.Context(), c.Do(ended, command()).Error()))
}

// In a cluster a node that answers says nothing about the others.
func TestNodesAreKnownApart(t *testing.T) {
	c := NewClient(&silent{mode: rueidis.ClientModeCluster}, nil, 0)
	require.NoError(t, c.Do(t.Context(), command()).Error()) // slot 0
	require.True(t, c.queues[0].answers())
	require.False(t, c.queues[1].answers())
	require.False(t, c.Answers())
}

// A batch has the requests of all callers that could run when the first of them was made. Each gets its
// own replies.
func TestABatchWaitsForRunnableCallers(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, func(t *testing.T) {
		conn := &silent{}
		const callers = 30
		errs := do(t, NewClient(conn, nil, 0), callers, time.Second)
		for range callers {
			require.NoError(t, <-errs)
		}
		require.EqualValues(t, callers, conn.sent.Load())
		require.Less(t, conn.batches.Load(), int32(callers/3), "now and then the scheduler runs another goroutine first")
	})
}

package wire

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// synchronous is a client that uses its connection like rueidis in its synchronous mode.
type synchronous struct {
	rueidis.Client
	conn    net.Conn
	timeout time.Duration
}

func (synchronous) Mode() rueidis.ClientMode { return rueidis.ClientModeStandalone }

func (c synchronous) Do(ctx context.Context, _ rueidis.Completed) rueidis.RedisResult {
	by, has := ctx.Deadline()
	if latest := time.Now().Add(c.timeout); !has || by.After(latest) {
		by, has = latest, false
	}
	_ = c.conn.SetDeadline(by)
	_, err := c.conn.Write([]byte("?"))
	if err == nil {
		_, err = c.conn.Read(make([]byte, 1))
	}
	if has && errors.Is(err, os.ErrDeadlineExceeded) {
		err = context.DeadlineExceeded
	}
	if err == nil {
		return rueidis.RedisResult{}
	}
	return rueidis.NewErrorResult(err)
}

// A request that is alone ends with the context of its caller, although rueidis waits in Read.
func TestRequestsAloneEndWithTheirContexts(t *testing.T) {
	const timeout, never = time.Second, 2 * time.Second
	for name, row := range map[string]struct {
		idle       time.Duration // after a pause the request is made on another goroutine
		reply, end time.Duration // after the request was sent
		took       time.Duration
		err        error
	}{
		"a reply":               {reply: 0, end: never, took: 0},
		"a late reply":          {reply: 3 * watchAfter, end: never, took: 3 * watchAfter},
		"canceled, reply soon":  {reply: watchAfter / 2, end: watchAfter / 4, took: watchAfter / 2},
		"canceled soon":         {reply: never, end: watchAfter / 4, took: watchAfter, err: context.Canceled},
		"canceled later":        {reply: never, end: 5 * watchAfter, took: 5 * watchAfter, err: context.Canceled},
		"no reply":              {reply: never, end: never, took: timeout - time.Nanosecond, err: os.ErrDeadlineExceeded},
		"idle, a late reply":    {idle: time.Minute, reply: 3 * watchAfter, end: never, took: 3 * watchAfter},
		"idle, canceled soon":   {idle: time.Minute, reply: never, end: watchAfter / 4, took: watchAfter / 4, err: context.Canceled},
		"idle, canceled later":  {idle: time.Minute, reply: never, end: 5 * watchAfter, took: 5 * watchAfter, err: context.Canceled},
		"a late reply, and end": {reply: 3 * watchAfter, end: 4 * watchAfter, took: 3 * watchAfter},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ours, server := net.Pipe()
				link := NewLink(timeout)
				p := NewPrompt(synchronous{conn: &ownConn{Conn: ours, written: make(chan struct{}), link: link}, timeout: timeout}, link)
				serve := func(pause time.Duration) {
					_, err := server.Read(make([]byte, 1))
					require.NoError(t, err)
					time.AfterFunc(pause, func() { _, _ = server.Write([]byte("!")) })
				}
				go serve(0)
				require.NoError(t, p.Do(context.Background(), rueidis.Completed{}).Error(), "the server answers")

				time.Sleep(row.idle)
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				go serve(row.reply)
				time.AfterFunc(row.end, cancel)
				sent := time.Now()
				err := p.Do(ctx, rueidis.Completed{}).Error()
				require.Equal(t, row.took, time.Since(sent))
				require.ErrorIs(t, err, row.err)
				require.Equal(t, row.err != nil, IsUnknown(err))
				undone := Undone(ctx, errors.Join(lock.ErrNotAcquired, lock.ErrIndeterminate, err))
				require.Equal(t, row.err != nil, errors.Is(undone, lock.ErrIndeterminate), "another connection's request may overtake it")
				synctest.Wait()
				time.Sleep(watchAfter)
				require.Equal(t, errors.Is(row.err, context.Canceled), link.Contended.Load(), "given up once")
				if err == nil { // the end of the context has no effect on the next request
					cancel()
					go serve(0)
					require.NoError(t, p.Do(context.Background(), rueidis.Completed{}).Error())
				}
				require.NoError(t, ours.Close())
				require.NoError(t, server.Close())
			})
		})
	}
}

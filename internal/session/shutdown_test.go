package session

import (
	"context"
	"iter"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/lock"
)

// listed has what is held.
type listed struct {
	mu  sync.Mutex
	all []Hold
}

func (l *listed) set(all []Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = all
}

func (l *listed) holds() iter.Seq[Hold] {
	return func(yield func(Hold) bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, h := range l.all {
			if !yield(h) {
				return
			}
		}
	}
}

// Everything that a session does keeps it from being idle, until it is done.
func TestDrainWaits(t *testing.T) {
	site := callsite.Here()
	for what, begin := range map[string]func(s *Session) (end func()){
		"a call": func(s *Session) func() {
			require.True(t, s.Enter())
			return s.Leave
		},
		"an acquisition from several sessions": func(s *Session) func() {
			leave, open := s.Join(func() {})
			require.True(t, open)
			return leave
		},
		"a task": func(s *Session) func() {
			done := make(chan struct{})
			require.True(t, s.Go(func(context.Context) { <-done }))
			return func() { close(done) }
		},
		"a hold": func(s *Session) func() {
			l := new(listed)
			s.List(l.holds)
			idle := []Hold{{Waiting: true}, {Disowned: true, Site: site}}
			l.set(append(idle, Hold{Site: site}))
			return func() { l.set(idle) }
		},
		"a part of a hold": func(s *Session) func() {
			l := new(listed)
			s.List(l.holds)
			l.set([]Hold{{}})
			return func() { l.set(nil) }
		},
		"nothing": func(*Session) func() { return func() {} },
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := bare()
				end := begin(s)
				s.stop()
				require.False(t, s.Enter())
				require.True(t, s.Stay())
				s.Leave()
				_, open := s.Join(func() {})
				require.False(t, open)
				require.NoError(t, s.Err())
				require.ErrorIs(t, s.Stopped(), lock.ErrClosed)

				ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, lock.ErrInvalid)
				defer cancel()
				began := time.Now()
				if what == "nothing" {
					require.NoError(t, s.drain(ctx))
					require.Zero(t, time.Since(began))
				} else {
					require.Equal(t, lock.ErrInvalid, s.drain(ctx))
					require.Equal(t, time.Minute, time.Since(began))
				}
				time.AfterFunc(time.Minute, end)
				require.NoError(t, s.drain(t.Context()))
				if what != "nothing" {
					require.InDelta(t, 2*time.Minute, time.Since(began), float64(maxDrainPause))
				}
				s.end()
			})
		})
	}
}

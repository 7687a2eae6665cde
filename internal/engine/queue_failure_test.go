package engine

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// TestAnOutageIsThatOfEveryWaiter has only the head make attempts, and all leave at the same time.
func TestAnOutageIsThatOfEveryWaiter(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		w.freeIn = 10 * time.Millisecond
		deadline := time.Now().Add(time.Second)
		var all []*caller
		for _, name := range []string{"head", "second", "third"} {
			all = append(all, w.ask(w.t.Context(), name, func(r *Request) { r.Deadline = deadline }))
			time.Sleep(time.Millisecond)
		}
		w.set(func() { w.err = &Unavailable{errors.Join(lock.ErrIndeterminate, io.EOF)} })
		for i, c := range all {
			err := <-c.done
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Equal(t, i == 0, errors.Is(err, lock.ErrIndeterminate), "only the head has sent requests: %v", err)
			require.Equal(t, i != 0, errors.Is(err, lock.ErrUnavailable), "%v", err)
		}
	})
}

// TestAnUnknownOutcomeIsNotForgotten has an attempt without a reply, and then none that is sent.
func TestAnUnknownOutcomeIsNotForgotten(t *testing.T) {
	run(t, func(w *world) {
		w.takeElsewhere()
		w.freeIn = 10 * time.Millisecond
		c := w.ask(w.t.Context(), "waiter", func(r *Request) { r.Deadline = time.Now().Add(5 * time.Second) })
		time.Sleep(time.Millisecond)
		w.set(func() { w.err = &Unavailable{errors.Join(lock.ErrIndeterminate, io.EOF)} })
		time.Sleep(2 * time.Second)
		w.set(func() { w.err = &Unavailable{errors.Join(lock.ErrUnavailable, io.ErrClosedPipe)} })
		require.ErrorIs(t, <-c.done, lock.ErrIndeterminate)

		// An answer ends it.
		c = w.ask(w.t.Context(), "waiter", func(r *Request) { r.Deadline = time.Now().Add(5 * time.Second) })
		require.ErrorIs(t, <-c.done, lock.ErrUnavailable, "the first attempt ends the wait")
		w.set(func() { w.err = nil })
		c = w.ask(w.t.Context(), "waiter", func(r *Request) { r.Deadline = time.Now().Add(5 * time.Second) })
		time.Sleep(time.Millisecond)
		w.set(func() { w.err = &Unavailable{errors.Join(lock.ErrIndeterminate, io.EOF)} })
		time.Sleep(time.Second)
		w.set(func() { w.err = nil })
		err := <-c.done
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
	})
}

package lock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

const client = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"

func TestOwner(t *testing.T) {
	o, err := lock.NewOwner(client, 42)
	require.NoError(t, err)
	require.Equal(t, client+":42", o.String())
	same, err := lock.ParseOwner(o.String())
	require.NoError(t, err)
	require.Equal(t, o, same)
	require.False(t, o.IsZero())
	require.True(t, lock.Owner{}.IsZero())

	for _, s := range []string{"", ":", client, client + ":", client + ":x", client + ":-1", client + ":1:write", "x" + client[1:] + ":1", "42"} {
		_, err := lock.ParseOwner(s)
		require.ErrorIs(t, err, lock.ErrInvalid, s)
	}
	_, err = lock.NewOwner("me", 1)
	require.ErrorIs(t, err, lock.ErrInvalid)
}

func TestOwnerInContext(t *testing.T) {
	_, ok := lock.OwnerFrom(t.Context())
	require.False(t, ok)
	o, err := lock.NewOwner(client, 1)
	require.NoError(t, err)
	ctx := lock.WithOwner(t.Context(), o)
	got, ok := lock.OwnerFrom(ctx)
	require.True(t, ok)
	require.Equal(t, o, got)
	_, ok = lock.OwnerFrom(lock.WithOwner(ctx, lock.Owner{}))
	require.False(t, ok)
}

func TestResolve(t *testing.T) {
	var none context.Context
	o, err := lock.Resolve[lock.Option](lock.Lease(time.Second), lock.Wait(0), lock.Lease(time.Minute))
	require.NoError(t, err)
	require.Equal(t, lock.Options{Lease: time.Minute, Bounded: true}, o)
	o, err = lock.Resolve[lock.Option]()
	require.NoError(t, err)
	require.Equal(t, lock.Options{}, o)
	for _, opt := range []lock.Option{
		nil, lock.Lease(0), lock.Lease(-2), lock.Lease(time.Millisecond - 1), lock.Wait(-1), lock.MaxHold(0), lock.Parent(none),
		lock.Site(-1), lock.AtLeast(-1), lock.AtLeast(time.Microsecond), lock.AtLeast(lock.MaxLease + 1),
	} {
		_, err := lock.Resolve(opt)
		require.ErrorIs(t, err, lock.ErrInvalid)
	}
	for _, opts := range [][]lock.Option{
		{lock.MaxHold(time.Second), lock.Lease(time.Second)},
		{lock.AtLeast(2 * time.Second), lock.Lease(time.Second)},
		{lock.AtLeast(2 * time.Second), lock.MaxHold(time.Second)},
	} {
		_, err = lock.Resolve(opts...)
		require.ErrorIs(t, err, lock.ErrInvalid)
	}
	o, err = lock.Resolve(lock.AtLeast(time.Second), lock.AtLeast(0))
	require.NoError(t, err)
	require.Zero(t, o.AtLeast, "the last one wins")
}

func TestSite(t *testing.T) {
	line := func(opts ...lock.Option) string {
		o, err := lock.Resolve(opts...)
		require.NoError(t, err)
		f, _ := runtime.CallersFrames([]uintptr{o.Site}).Next()
		return f.Function
	}
	constructor := func(skip int) lock.Option { return lock.Site(skip) }
	require.Regexp(t, `TestSite$`, line(lock.Site(0)))
	require.Regexp(t, `TestSite.func2$`, line(constructor(0)))
	require.Regexp(t, `TestSite$`, line(constructor(0), constructor(1)))
	require.Empty(t, line(lock.Site(1000)))
}

func TestLostError(t *testing.T) {
	boom := errors.New("boom")
	err := error(&lock.LostError{Name: "orders", Reason: lock.ReasonExpired, Err: boom})
	require.ErrorIs(t, err, lock.ErrLost)
	require.ErrorIs(t, err, boom)
	require.NotErrorIs(t, err, lock.ErrClosed)
	require.ErrorContains(t, err, `"orders"`)
	require.ErrorContains(t, err, "boom")
	require.ErrorIs(t, &lock.LostError{Reason: lock.ReasonClosed}, lock.ErrClosed)

	// A renewal that had no answer is part of the message only.
	for _, cause := range []error{context.DeadlineExceeded, lock.ErrIndeterminate, lock.ErrUnavailable} {
		err := &lock.LostError{Name: "orders", Reason: lock.ReasonExpired, Err: errors.Join(cause, boom)}
		require.NotErrorIs(t, err, cause)
		require.ErrorContains(t, err, cause.Error()+"; boom")
	}
}

// fake is a Locker without a server.
type fake struct {
	lock.Locker
	unlocked int
	err      error
}

func (f *fake) Name() string { return "fake" }

func (f *fake) Lock(ctx context.Context, _ ...lock.Option) (lock.Hold, error) {
	return fakeHold{f: f, ctx: ctx}, nil
}

type fakeHold struct {
	lock.Hold
	f   *fake
	ctx context.Context // as in a real hold
}

func (h fakeHold) Context() context.Context { return h.ctx }

func (h fakeHold) Unlock(context.Context) error {
	h.f.unlocked++
	return h.f.err
}

func TestDoUnlocksAfterPanicAndGoexit(t *testing.T) {
	f := &fake{err: lock.ErrLost}
	require.PanicsWithValue(t, "boom", func() {
		_ = lock.Do(t.Context(), f, func(context.Context) error { panic("boom") })
	})
	require.Equal(t, 1, f.unlocked)

	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = lock.Do(t.Context(), f, func(context.Context) error { runtime.Goexit(); return nil })
	}()
	<-done
	require.Equal(t, 2, f.unlocked)

	require.ErrorIs(t, lock.Do(t.Context(), f, nil), lock.ErrInvalid)
	require.Equal(t, 2, f.unlocked)
}

func TestErrorsOfDo(t *testing.T) {
	boom := errors.New("boom")
	for _, failed := range []error{nil, boom} {
		for _, unlock := range []error{nil, lock.ErrLost} {
			err := lock.Do(t.Context(), &fake{err: unlock}, func(context.Context) error { return failed })
			if unlock == nil {
				require.Equal(t, failed, err)
				continue
			}
			require.Equal(t, &lock.DoError{Func: failed, Unlock: unlock}, err)
			require.ErrorIs(t, err, unlock)
			require.Equal(t, failed != nil, errors.Is(err, boom))
			require.Equal(t, failed != nil, strings.HasPrefix(err.Error(), "boom; "))
		}
	}
}

// A function that fails because the lock was lost may return the loss.
func TestErrorOfDoSaysALossOnce(t *testing.T) {
	lost := &lock.LostError{Name: "orders", Reason: lock.ReasonGone}
	err := lock.Do(t.Context(), &fake{err: lost}, func(context.Context) error { return fmt.Errorf("ship: %w", lost) })
	require.EqualError(t, err, "ship: "+lost.Error())
	var both *lock.DoError
	require.ErrorAs(t, err, &both)
	require.Equal(t, lost, both.Unlock)
}

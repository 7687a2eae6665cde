package once_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Success is stored although its request or reply is lost, and then nobody repeats the work.
func TestFaultsWhileSuccessIsStored(t *testing.T) {
	harness.EachOf(t, harness.Faults, harness.Fault.String, func(t *testing.T, s *testserver.Server, f harness.Fault) {
		// A silent connection is noticed after the timeout for replies.
		c, g := harness.GatedClient(t, s)
		other := harness.Client(t, s)
		o := c.Once(name)
		call, work := occupy(t, o)
		g.During(t, f, wire.OnceDone(name, slot), func() {
			work.result <- nil
			require.NoError(t, call.End())
		})
		require.True(t, call.Value.ran)
		require.True(t, done(t, other.Once(name), slot))
		var w counter
		require.False(t, runs(t, other.Once(name), slot, w.work))
		require.Zero(t, w.runs.Load())
		require.NoError(t, g.Open())
		require.True(t, forget(t, other.Once(name), slot))
		harness.NothingLeft(t, s.Addr)
	})
}

// Without a server, success is stored as soon as there is one again, while the lock lasts, and for a
// while after the end of ctx.
func TestOutageWhileSuccessIsStored(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		call, work := occupy(t, c.Once(name))
		g.Stall()
		call.Cancel(errors.New("over"))
		work.result <- nil
		time.Sleep(engine.UnlockTimeout / 2) // the first attempts fail, or wait
		require.True(t, call.Running())
		require.NoError(t, g.Open())
		require.True(t, call.Got().ran)
		require.True(t, done(t, harness.Client(t, s).Once(name), slot))
	})
}

// If success cannot be stored, the error says that the work may run again. The end of ctx and Close
// end the attempts.
func TestSuccessThatIsNotStored(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Run("outage", func(t *testing.T) {
			c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(time.Second))
			call, work := occupy(t, c.Once(name))
			g.Stall()
			began := time.Now()
			work.result <- nil
			err := call.EndWithin(2*engine.UnlockTimeout + soon)
			require.ErrorIs(t, err, lock.ErrIndeterminate)
			require.True(t, call.Value.ran)
			require.GreaterOrEqual(t, time.Since(began), engine.UnlockTimeout-time.Second)
			require.NoError(t, g.Open())
		})
		t.Run("end of the context", func(t *testing.T) {
			c, g := harness.GatedClient(t, s)
			o := c.Once(name)
			b := newBlocked()
			call := start(t, o, "a long lease", b.work, lock.Lease(time.Hour))
			harness.Receive(t, soon, "the work", b.begun)
			g.Stall()
			b.result <- nil
			call.Cancel(errors.New("over"))
			err := call.EndWithin(3*engine.UnlockTimeout + soon)
			require.ErrorIs(t, err, lock.ErrIndeterminate)
			require.True(t, call.Value.ran)
			require.NoError(t, g.Open())
		})
		t.Run("close", func(t *testing.T) {
			c := harness.Client(t, s)
			b := newBlocked()
			call := start(t, c.Once(name), "closed", b.work)
			harness.Receive(t, soon, "the work", b.begun)
			c.Close()
			b.result <- nil
			err := call.EndWithin(soon)
			require.True(t, call.Value.ran)
			require.ErrorIs(t, err, lock.ErrClosed)
			require.False(t, done(t, harness.Client(t, s).Once(name), "closed"))
		})
		t.Run("refused", func(t *testing.T) {
			c := harness.Client(t, s)
			harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "-set")
			defer harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "+set")
			var w counter
			ran, err := c.Once(name).Run(t.Context(), "refused", w.work, lock.AtLeast(time.Minute))
			require.True(t, ran)
			refused(t, err, "NOPERM")
			require.Greater(t, harness.PTTL(t, s.Addr, wire.OnceRun(name, "refused")), time.Second.Milliseconds(),
				"it may run again, so the slot is kept")
		})
	})
}

// An answer that refuses what an attempt without an answer may have stored leaves that open.
func TestRefusalAfterALostReply(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		call, work := occupy(t, c.Once(name))
		reached := g.Arm(harness.KeepReply, wire.OnceDone(name, slot), 1)
		work.result <- nil
		harness.Reached(t, reached)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "-set")
		defer harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "+set")
		err := call.EndWithin(2*engine.UnlockTimeout + soon)
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		require.ErrorContains(t, err, "NOPERM")
		require.NoError(t, g.Open())
	})
}

// Shutdown waits until the success of work that runs is stored.
func TestRunAndShutdown(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		call, work := occupy(t, c.Once(name))
		down := harness.Start(t, t.Context(), func(ctx context.Context) (struct{}, error) { return struct{}{}, c.Shutdown(ctx) })
		harness.Eventually(t, soon, "the client closes", func() bool {
			_, err := c.Once(name).Run(t.Context(), "another", func(context.Context) error { return errWork })
			return errors.Is(err, lock.ErrClosed)
		})
		require.True(t, down.Running())
		work.result <- nil
		require.True(t, call.Got().ran)
		require.NoError(t, down.EndWithin(soon))
		require.True(t, done(t, harness.Client(t, s).Once(name), slot))
	})
}

// Shutdown ends with its context, although the success of work that has run cannot be stored.
func TestShutdownBesideASilentServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		const patience = 2 * time.Second // well below engine.UnlockTimeout
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s)
		call, work := occupy(t, c.Once(name))
		s.Pause()
		defer s.Resume()
		work.result <- nil
		time.Sleep(patience / 10) // it tries to store that
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		began := time.Now()
		require.ErrorIs(t, c.Shutdown(ctx), context.DeadlineExceeded)
		require.Less(t, time.Since(began), 2*patience)
		require.ErrorIs(t, call.EndWithin(soon), lock.ErrIndeterminate)
	})
}

// Nothing runs if the server cannot say whether the work has been done.
func TestUnavailable(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var w counter
		t.Run("server", func(t *testing.T) {
			c, g := harness.GatedClient(t, s)
			g.Stall()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, err := c.Once(name).Done(ctx, slot)
			require.ErrorIs(t, err, lock.ErrUnavailable)
			ran, err := c.Once(name).Run(ctx, slot, w.work)
			require.ErrorIs(t, err, lock.ErrUnavailable)
			require.False(t, ran)
			_, err = c.Once(name).Forget(ctx, slot)
			require.True(t, errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate), "%v", err)
			require.NoError(t, g.Open())
		})
		t.Run("under the lock", func(t *testing.T) {
			c, g := harness.GatedClient(t, s)
			reached := g.Arm(harness.Silence, wire.OnceDone(name, slot), 2)
			call := harness.Start(t, t.Context(), func(ctx context.Context) (outcome, error) {
				ran, err := c.Once(name).Run(ctx, slot, w.work)
				return outcome{ran}, err
			})
			harness.Reached(t, reached)
			call.Cancel(errors.New("over"))
			require.ErrorIs(t, call.EndWithin(engine.UnlockTimeout+soon), lock.ErrUnavailable, "Unlock gets no reply either")
			require.False(t, call.Value.ran)
			require.NoError(t, g.Open())
			require.True(t, runs(t, harness.Client(t, s).Once(name), slot, func(context.Context) error { return nil }, lock.Wait(soon)))
			require.True(t, forget(t, harness.Client(t, s).Once(name), slot))
		})
		require.Zero(t, w.runs.Load())
		harness.NothingLeft(t, s.Addr)
	})
}

// A key of another type is the server's error.
func TestForeignKeys(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		o := harness.Client(t, s).Once(name)
		var w counter
		harness.Do(t, s.Addr, "SET", wire.OnceRun(name, slot), "x")
		ran, err := o.Run(t.Context(), slot, w.work)
		require.False(t, ran)
		refused(t, err, "WRONGTYPE")
		harness.Do(t, s.Addr, "DEL", wire.OnceRun(name, slot))
		harness.Do(t, s.Addr, "RPUSH", wire.OnceDone(name, slot), "x")
		ran, err = o.Run(t.Context(), slot, w.work)
		require.False(t, ran)
		refused(t, err, "WRONGTYPE")
		_, err = o.MarkDone(t.Context(), slot)
		refused(t, err, "WRONGTYPE")
		require.True(t, forget(t, o, slot))
		require.Zero(t, w.runs.Load())
		harness.NothingLeft(t, s.Addr)
	})
}

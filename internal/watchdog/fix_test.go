package watchdog

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/redlatch/redlatch/lock"
)

// Renewed reports whether the watchdog renews the lease.
func (l *Lease) Renewed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.renewer != nil
}

func TestFixedLeaseExpires(t *testing.T) {
	for name, c := range map[string]struct {
		terms Terms
		ttl   time.Duration
	}{
		"renewed, sooner":       {Terms{}, timeout / 2},
		"renewed, later":        {Terms{}, 4 * timeout},
		"not renewed, sooner":   {Terms{TTL: time.Hour}, time.Minute},
		"not renewed, later":    {Terms{TTL: time.Minute}, time.Hour},
		"before it was renewed": {Terms{}, timeout / 10},
		"with a MaxHold later":  {Terms{MaxHold: time.Hour}, timeout},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(t *testing.T, wd *Watchdog, s *server) {
				if c.terms.TTL == 0 {
					c.terms.Renewer = s
				}
				h := watch(t, wd, "a", c.terms)
				assert.Equal(t, c.terms.Renewer != nil, h.Renewed())
				time.Sleep(timeout / 20)
				sent := time.Now()
				h.Fix(sent, c.ttl)
				assert.False(t, h.Renewed())
				assert.Equal(t, Certain(c.ttl), h.Remaining())
				time.Sleep(Certain(c.ttl) - time.Millisecond)
				synctest.Wait()
				assert.Zero(t, h.loss().times)
				assert.Equal(t, time.Millisecond, h.Remaining())
				time.Sleep(2 * tick)
				synctest.Wait()
				assert.Equal(t, 1, h.loss().times)
				assert.Equal(t, lock.ReasonExpired, h.loss().reason)
				assert.Equal(t, Certain(c.ttl), h.loss().when.Sub(sent))
				assert.Zero(t, h.Remaining())
				assert.Zero(t, s.renewals())
			})
		})
	}
}

// The fixed period ends before the reply arrives.
func TestFixInThePastLosesLease(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		h := watch(t, wd, "a", Terms{Renewer: s})
		sent := time.Now()
		time.Sleep(time.Second)
		h.Fix(sent, time.Millisecond)
		assert.Zero(t, h.Remaining())
		time.Sleep(2 * tick)
		synctest.Wait()
		assert.Equal(t, lock.ReasonExpired, h.loss().reason)
	})
}

func TestMaxHoldEndsFixedLease(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		h := watch(t, wd, "a", Terms{Renewer: s, MaxHold: time.Minute})
		h.Fix(time.Now(), time.Hour)
		assert.Equal(t, time.Minute, h.Remaining())
		time.Sleep(time.Minute + tick)
		synctest.Wait()
		assert.Equal(t, lock.ReasonMaxHold, h.loss().reason)
	})
}

func TestFixAgainAndExtend(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		h := watch(t, wd, "a", Terms{Renewer: s})
		h.Fix(time.Now(), time.Second)
		h.Fix(time.Now(), time.Minute)
		assert.Equal(t, Certain(time.Minute), h.Remaining())
		h.Fix(time.Now(), time.Second)
		assert.Equal(t, Certain(time.Second), h.Remaining())
		h.Extended(time.Now(), time.Minute)
		assert.Equal(t, Certain(time.Minute), h.Remaining())
		h.Extended(time.Now(), time.Second) // at least
		assert.Equal(t, Certain(time.Minute), h.Remaining())
		assert.False(t, h.Renewed())
		time.Sleep(Certain(time.Minute) - time.Millisecond)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		time.Sleep(2 * tick)
		synctest.Wait()
		assert.Equal(t, lock.ReasonExpired, h.loss().reason)
		assert.Zero(t, s.renewals())
	})
}

// A renewal in flight when the lease is fixed has no effect, unless it finds the lease
// gone.
func TestFixDuringRenewal(t *testing.T) {
	const latency = 500 * time.Millisecond
	for name, c := range map[string]struct {
		change func(*server)
		gone   bool
	}{
		"that succeeds":      {func(*server) {}, false},
		"that fails":         {func(s *server) { s.err = errors.New("boom") }, false},
		"that finds it gone": {func(s *server) { s.gone["a"] = true }, true},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(t *testing.T, wd *Watchdog, s *server) {
				s.set(func(s *server) { s.latency = latency })
				s.set(c.change)
				h := watch(t, wd, "a", Terms{Renewer: s})
				for s.renewals() == 0 {
					time.Sleep(tick)
				}
				const ttl = timeout / 5 // less than the renewal gives
				h.Fix(time.Now(), ttl)
				time.Sleep(latency)
				synctest.Wait()
				if c.gone {
					assert.Equal(t, lock.ReasonGone, h.loss().reason)
					return
				}
				assert.Zero(t, h.loss().times)
				assert.Equal(t, Certain(ttl)-latency, h.Remaining())
				time.Sleep(Certain(ttl) - latency - time.Millisecond)
				synctest.Wait()
				assert.Zero(t, h.loss().times)
				time.Sleep(2 * tick)
				synctest.Wait()
				assert.Equal(t, lock.ReasonExpired, h.loss().reason)
				assert.Equal(t, 1, s.renewals())
			})
		})
	}
}

func TestFixAfterEnd(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		forgotten := watch(t, wd, "a", Terms{Renewer: s})
		forgotten.Forget()
		forgotten.Fix(time.Now(), time.Minute)
		assert.Zero(t, forgotten.Remaining())

		// No timer has noticed yet.
		late := watch(t, wd, "b", Terms{})
		late.overdue()
		assert.Zero(t, late.loss().times)
		late.Fix(time.Now(), time.Minute)
		assert.Equal(t, lock.ReasonExpired, late.loss().reason)
		assert.Zero(t, late.Remaining())
		assert.False(t, forgotten.timer.at != nil || late.timer.at != nil, "an ended lease has a timer")
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Zero(t, forgotten.loss().times)
		assert.Equal(t, 1, late.loss().times)
	})
}

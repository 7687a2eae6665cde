package watchdog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

const timeout = 30 * time.Second

// server answers renewals.
type server struct {
	mu      sync.Mutex
	batches [][]string
	at      []time.Time
	err     error
	gone    map[string]bool
	moving  map[string]error // errors of single leases
	latency time.Duration
	shared  []bool                // of each wave
	waves   []int                 // leases per wave
	hung    func(key string) bool // reports whether the key's node hangs
}

func (s *server) Renew(ctx context.Context, batches [][]Subject, _ time.Duration, shared bool) []Renewed {
	s.mu.Lock()
	results := make([]Renewed, len(batches))
	leases := 0
	for b, batch := range batches {
		var keys []string
		for _, l := range batch {
			keys = append(keys, l.Key)
			results[b].Held = append(results[b].Held, !s.gone[l.Key])
			if s.moving != nil {
				results[b].Errs = append(results[b].Errs, s.moving[l.Key])
			}
		}
		results[b].Err = s.err
		leases += len(batch)
		s.batches, s.at = append(s.batches, keys), append(s.at, time.Now())
	}
	s.shared, s.waves = append(s.shared, shared), append(s.waves, leases)
	latency := s.latency
	if s.hung != nil {
		for _, batch := range batches {
			if s.hung(batch[0].Key) {
				latency = time.Hour
			}
		}
	}
	s.mu.Unlock()
	select {
	case <-time.After(latency):
	case <-ctx.Done():
		for b, batch := range batches {
			if s.hung == nil || s.hung(batch[0].Key) {
				results[b].Err = ctx.Err()
			}
		}
	}
	return results
}

func (s *server) set(change func(*server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *server) renewals() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.batches)
}

// holder records its loss.
type holder struct {
	Lease
	Subject
	mu       sync.Mutex
	l        loss
	failures []failure
}

type failure struct {
	err  error
	left time.Duration
}

type loss struct {
	times  int
	reason lock.Reason
	cause  error
	when   time.Time
}

func (h *holder) Leased() Subject { return h.Subject }

func (h *holder) Lost(reason lock.Reason, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.l = loss{h.l.times + 1, reason, cause, time.Now()}
}

// overdue makes the lease one that has ended although no timer has noticed.
func (h *holder) overdue() {
	h.Lease.mu.Lock()
	defer h.Lease.mu.Unlock()
	h.deadline = h.watchdog.wheel.instant(time.Now())
}

func (h *holder) RenewalFailed(err error, left time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failures = append(h.failures, failure{err, left})
}

func (h *holder) loss() loss {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.l
}

func watch(t *testing.T, wd *Watchdog, key string, terms Terms) *holder {
	t.Helper()
	h := &holder{Subject: Subject{Key: key, Owner: "owner of " + key}}
	if terms.Sent.IsZero() {
		terms.Sent = time.Now()
	}
	if terms.TTL == 0 {
		terms.TTL = timeout
	}
	require.True(t, wd.Watch(&h.Lease, h, terms))
	return h
}

func run(t *testing.T, test func(t *testing.T, wd *Watchdog, s *server)) {
	synctest.Test(t, func(t *testing.T) {
		wd := New(Config{})
		defer wd.Close()
		test(t, wd, &server{gone: map[string]bool{}})
	})
}

func TestLeaseIsRenewedEveryThird(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		h := watch(t, wd, "a", Terms{Renewer: s})
		begin := time.Now()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		for i, at := range s.at {
			due := time.Duration(i+1) * timeout / 3
			assert.LessOrEqual(t, at.Sub(begin), due+time.Duration(i+1)*tick)
			if i > 0 {
				assert.Greater(t, at.Sub(s.at[i-1]), timeout/3-timeout/96-tick)
			}
		}
		assert.InDelta(t, 60, len(s.at), 3)
		assert.Greater(t, h.Remaining(), timeout/2)
	})
}

// A lease ends before it does on a server whose clock is faster by a thousandth, whatever the tick of the
// wheel, and not much earlier.
func TestLeaseEndsBeforeItDoesOnTheServer(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		s.set(func(s *server) { s.err = errors.New("boom") })
		for _, ttl := range []time.Duration{time.Millisecond, 7 * time.Millisecond, 503 * time.Millisecond, 10 * time.Second} {
			for _, how := range []string{"as taken", "extended", "fixed", "not renewed"} {
				time.Sleep(1300 * time.Microsecond) // between two ticks
				sent := time.Now()
				terms, taken := Terms{Sent: sent, TTL: ttl}, ttl
				if how != "as taken" {
					terms.TTL = time.Hour
				}
				if how == "not renewed" {
					terms.TTL, terms.Renewer = ttl, s
				}
				if how == "extended" {
					terms.TTL, taken = ttl, 2*ttl
				}
				h := watch(t, wd, "a", terms)
				switch how {
				case "extended":
					h.Extended(sent, taken)
				case "fixed":
					h.Fix(sent, taken)
				}
				require.LessOrEqual(t, h.Remaining(), taken-taken/1000)
				time.Sleep(taken - taken/1000)
				synctest.Wait()
				lost := h.loss()
				require.Equal(t, lock.ReasonExpired, lost.reason, "%v %s", ttl, how)
				require.Less(t, lost.when.Sub(sent), taken-taken/1000, "%v %s", ttl, how)
				require.GreaterOrEqual(t, lost.when.Sub(sent), taken-taken/1000-min(time.Millisecond, taken/10), "%v %s", ttl, how)
			}
		}
	})
}

func TestFailedRenewalIsRetried(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		boom := errors.New("boom")
		s.set(func(s *server) { s.err = boom })
		h := watch(t, wd, "a", Terms{Renewer: s})
		time.Sleep(timeout - time.Second)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.Greater(t, s.renewals(), 15) // at most a second apart, for 19 seconds
		require.Len(t, h.failures, s.renewals())
		assert.Equal(t, boom, h.failures[0].err)
		assert.InDelta(t, timeout*2/3, h.failures[0].left, float64(timeout/96+tick))
		s.set(func(s *server) { s.err = nil })
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.Greater(t, h.Remaining(), timeout-2*time.Second)
	})
}

func TestRenewalTimeoutIsRetried(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		s.set(func(s *server) { s.latency = time.Hour })
		h := watch(t, wd, "a", Terms{Renewer: s})
		time.Sleep(timeout - time.Second)
		synctest.Wait()
		assert.GreaterOrEqual(t, s.renewals(), 5)
		assert.Zero(t, h.loss().times)
		time.Sleep(time.Second + tick)
		synctest.Wait()
		assert.Equal(t, lock.ReasonExpired, h.loss().reason)
		assert.Equal(t, context.DeadlineExceeded, h.loss().cause)
	})
}

func TestRenewalCountsFromRequest(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		s.set(func(s *server) { s.latency = 1500 * time.Millisecond })
		h := watch(t, wd, "a", Terms{Renewer: s})
		time.Sleep(timeout/3 + 1500*time.Millisecond + tick)
		synctest.Wait()
		assert.Equal(t, 1, s.renewals())
		assert.LessOrEqual(t, h.Remaining(), timeout-1500*time.Millisecond)
		assert.Greater(t, h.Remaining(), timeout-3*time.Second)
	})
}

func TestEndedLeaseStaysEnded(t *testing.T) {
	for what, happens := range map[string]func(wd *Watchdog, h *holder){
		"Check":    func(_ *Watchdog, h *holder) { h.Check() },
		"Extended": func(_ *Watchdog, h *holder) { h.Extended(time.Now(), time.Minute) },
		"a renewal": func(wd *Watchdog, h *holder) {
			h.Lease.mu.Lock()
			h.state = renewing
			h.Lease.mu.Unlock()
			wd.apply(&h.Lease, time.Now(), time.Now(), time.Minute, nil, true)
		},
	} {
		t.Run(what, func(t *testing.T) {
			run(t, func(t *testing.T, wd *Watchdog, s *server) {
				h := watch(t, wd, "a", Terms{TTL: time.Minute})
				h.overdue()
				require.Zero(t, h.loss().times)
				happens(wd, h)
				assert.Equal(t, lock.ReasonExpired, h.loss().reason)
				assert.Zero(t, h.Remaining())
				time.Sleep(time.Second)
				assert.Equal(t, 1, h.loss().times)
			})
		})
	}
}

// slow is a holder that the watchdog takes a while to tell.
type slow struct {
	*holder
	told    atomic.Bool
	telling chan struct{}
	goOn    chan struct{}
}

func (h *slow) Lost(reason lock.Reason, cause error) {
	if !h.told.Swap(true) {
		close(h.telling)
		<-h.goOn
	}
	h.holder.Lost(reason, cause)
}

// The watchdog has ended the lease, and not told the holder yet.
func TestCheckTellsOfLossUnderWay(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		terms  Terms
		change func(wd *Watchdog, s *server)
		want   loss
	}{
		"expired": {Terms{}, func(*Watchdog, *server) {}, loss{reason: lock.ReasonExpired}},
		"not renewed": {
			Terms{Renewer: &server{err: boom}}, func(*Watchdog, *server) {}, loss{reason: lock.ReasonExpired, cause: boom},
		},
		"gone": {
			Terms{Renewer: &server{gone: map[string]bool{"a": true}}}, func(*Watchdog, *server) {}, loss{reason: lock.ReasonGone},
		},
		"MaxHold": {Terms{MaxHold: time.Second}, func(*Watchdog, *server) {}, loss{reason: lock.ReasonMaxHold}},
		"closed":  {Terms{}, func(wd *Watchdog, _ *server) { go wd.Close() }, loss{reason: lock.ReasonClosed}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(t *testing.T, wd *Watchdog, s *server) {
				h := &slow{holder: &holder{}, telling: make(chan struct{}), goOn: make(chan struct{})}
				h.Key = "a"
				c.terms.Sent, c.terms.TTL = time.Now(), timeout
				require.True(t, wd.Watch(&h.Lease, h, c.terms))
				c.change(wd, s)
				<-h.telling
				assert.Zero(t, h.Remaining())
				assert.Zero(t, h.loss().times)
				h.Check()
				got := h.loss()
				assert.Equal(t, 1, got.times)
				assert.Equal(t, c.want.reason, got.reason)
				assert.Equal(t, c.want.cause, got.cause)
				h.Forget() // as a holder does that has heard of it
				h.Check()
				assert.Equal(t, 1, h.loss().times)
				close(h.goOn)
			})
		})
	}
}

func TestForgottenLease(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		early := watch(t, wd, "a", Terms{Renewer: s})
		early.Forget()
		s.set(func(s *server) { s.latency, s.gone["b"] = time.Second, true })
		during := watch(t, wd, "b", Terms{Renewer: s})
		time.Sleep(timeout/3 + 500*time.Millisecond)
		synctest.Wait()
		require.Equal(t, 1, s.renewals())
		during.Forget() // during its renewal
		during.Forget()
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Zero(t, early.loss().times)
		assert.Zero(t, during.loss().times)
		assert.Equal(t, 1, s.renewals())
		assert.Zero(t, during.Remaining())
	})
}

func TestRenewalDoesNotShortenExtendedLease(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		h := watch(t, wd, "a", Terms{Renewer: s})
		h.Extended(time.Now(), 10*time.Minute)
		time.Sleep(9 * time.Minute)
		synctest.Wait()
		assert.Positive(t, s.renewals()) // detects a loss
		assert.Greater(t, h.Remaining(), 55*time.Second)
		h.Extended(time.Now(), time.Second)
		assert.Greater(t, h.Remaining(), 55*time.Second)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.Positive(t, s.renewals())
	})
}

func TestCloseNotifiesEveryHolderOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wd := New(Config{})
		s := &server{latency: time.Second}
		var all []*holder
		for i := range 50 {
			all = append(all, watch(t, wd, fmt.Sprint(i), Terms{Renewer: s}))
		}
		all = append(all, watch(t, wd, "fixed", Terms{TTL: time.Hour}))
		forgotten := watch(t, wd, "forgotten", Terms{Renewer: s})
		forgotten.Forget()
		time.Sleep(timeout/3 + 100*time.Millisecond) // renewals are under way
		wd.Close()
		wd.Close()
		for _, h := range all {
			assert.Equal(t, 1, h.loss().times, h.Key)
			assert.Equal(t, lock.ReasonClosed, h.loss().reason)
		}
		assert.Zero(t, forgotten.loss().times)
		var late holder
		assert.False(t, wd.Watch(&late.Lease, &late, Terms{Sent: time.Now(), TTL: timeout}))
	})
}

func TestCloseNotifiesHolderWhoseTimerFires(t *testing.T) {
	// The wheel has removed the timer, and its goroutine has not called Expire yet when
	// the watchdog is closed.
	wd := New(Config{})
	h := watch(t, wd, "a", Terms{TTL: time.Hour})
	wd.wheel.Cancel(&h.timer)
	wd.wheel.Stop()
	h.Expire(time.Now())
	wd.Close()
	assert.Equal(t, lock.ReasonClosed, h.loss().reason)
}

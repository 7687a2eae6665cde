package watchdog

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
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
	latency time.Duration
	detours []bool                // of each wave
	waves   []int                 // leases in each
	hung    func(key string) bool // whose node does not answer
}

func (s *server) Renew(ctx context.Context, batches [][]*Lease, _ time.Duration, detour bool) []Renewed {
	s.mu.Lock()
	results := make([]Renewed, len(batches))
	leases := 0
	for b, batch := range batches {
		var keys []string
		for _, l := range batch {
			keys = append(keys, l.Key)
			results[b].Held = append(results[b].Held, !s.gone[l.Key])
		}
		results[b].Err = s.err
		leases += len(batch)
		s.batches, s.at = append(s.batches, keys), append(s.at, time.Now())
	}
	s.detours, s.waves = append(s.detours, detour), append(s.waves, leases)
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

// holder remembers its loss.
type holder struct {
	Lease
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

func (h *holder) Lost(reason lock.Reason, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.l = loss{h.l.times + 1, reason, cause, time.Now()}
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

func watch(t *testing.T, d *Dog, key string, terms Terms) *holder {
	t.Helper()
	h := &holder{Lease: Lease{Key: key, Owner: "owner of " + key}}
	if terms.Sent.IsZero() {
		terms.Sent = time.Now()
	}
	if terms.TTL == 0 {
		terms.TTL = timeout
	}
	require.True(t, d.Watch(&h.Lease, h, terms))
	return h
}

func run(t *testing.T, test func(t *testing.T, d *Dog, s *server)) {
	synctest.Test(t, func(t *testing.T) {
		d := NewDog(Config{})
		defer d.Close()
		test(t, d, &server{gone: map[string]bool{}})
	})
}

func TestALeaseIsRenewedEveryThird(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		h := watch(t, d, "a", Terms{Renewer: s})
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

func TestLeasesAreRenewedInBatchesOfOneSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slot := func(key string) int { return int(key[0]) }
		d := NewDog(Config{Slot: slot})
		defer d.Close()
		s := &server{}
		for i := range 350 {
			watch(t, d, fmt.Sprintf("%c%d", 'a'+i%2, i), Terms{Renewer: s})
		}
		time.Sleep(timeout/3 + time.Second)
		synctest.Wait()
		require.Len(t, s.batches, 4)
		for _, b := range s.batches {
			assert.LessOrEqual(t, len(b), batchSize)
			for _, key := range b {
				assert.Equal(t, slot(b[0]), slot(key))
			}
		}
	})
}

func TestALeaseThatIsGoneIsLostAloneAndForGood(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		a, b := watch(t, d, "a", Terms{Renewer: s}), watch(t, d, "b", Terms{Renewer: s})
		s.set(func(s *server) { s.gone["a"] = true })
		time.Sleep(timeout / 2)
		synctest.Wait()
		s.set(func(s *server) { s.gone["a"] = false })
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, lock.ReasonGone, a.loss().reason)
		assert.Equal(t, 1, a.loss().times)
		assert.Zero(t, a.Remaining())
		assert.Zero(t, b.loss().times)
		for _, batch := range s.batches[1:] {
			assert.NotContains(t, batch, "a")
		}
	})
}

func TestRenewalIsTriedAgainWithinTheLease(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		boom := errors.New("boom")
		s.set(func(s *server) { s.err = boom })
		h := watch(t, d, "a", Terms{Renewer: s})
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

func TestAfterAFailureEverySecondTryIsADetour(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		s.set(func(s *server) { s.err = errors.New("boom") })
		h := watch(t, d, "a", Terms{Renewer: s})
		for s.renewals() < 4 {
			time.Sleep(tick)
		}
		s.set(func(s *server) { s.err = nil })
		time.Sleep(timeout)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.Equal(t, []bool{false, true, false, true, false, false}, s.detours[:6])
	})
}

func TestManyLeasesAreRenewedInWaves(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		s.set(func(s *server) { s.latency = time.Second })
		const leases = 3 * maxWorkers * maxWaveLeases / 2
		for i := range leases {
			watch(t, d, strconv.Itoa(i), Terms{Renewer: s})
		}
		time.Sleep(timeout/3 + 2*time.Second + time.Millisecond) // two rounds of all workers
		synctest.Wait()
		renewed := 0
		for _, n := range s.waves {
			assert.LessOrEqual(t, n, maxWaveLeases)
			renewed += n
		}
		assert.Equal(t, leases, renewed)
		assert.Equal(t, leases/batchSize, len(s.batches))
	})
}

func TestALeaseWithoutConfirmationEndsWhenItsLastRequestWasSentPlusItsLength(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		boom := errors.New("boom")
		s.set(func(s *server) { s.err = boom })
		sent := time.Now().Add(-time.Second)
		h := watch(t, d, "a", Terms{Sent: sent, Renewer: s})
		assert.LessOrEqual(t, h.Remaining(), timeout-time.Second)
		time.Sleep(timeout)
		synctest.Wait()
		require.Equal(t, 1, h.loss().times)
		assert.Equal(t, lock.ReasonExpired, h.loss().reason)
		assert.Equal(t, boom, h.loss().cause)
		assert.GreaterOrEqual(t, h.loss().when.Sub(sent), timeout)
		assert.LessOrEqual(t, h.loss().when.Sub(sent), timeout+tick)
	})
}

func TestAServerThatDoesNotAnswerIsAskedAgain(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		s.set(func(s *server) { s.latency = time.Hour })
		h := watch(t, d, "a", Terms{Renewer: s})
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

func TestARenewalThatTakesTimeCountsFromWhenItWasSent(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		s.set(func(s *server) { s.latency = 1500 * time.Millisecond })
		h := watch(t, d, "a", Terms{Renewer: s})
		time.Sleep(timeout/3 + 1500*time.Millisecond + tick)
		synctest.Wait()
		assert.Equal(t, 1, s.renewals())
		assert.LessOrEqual(t, h.Remaining(), timeout-1500*time.Millisecond)
		assert.Greater(t, h.Remaining(), timeout-3*time.Second)
	})
}

func TestAFixedLeaseIsNotRenewed(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		h := watch(t, d, "a", Terms{TTL: time.Minute})
		time.Sleep(time.Minute - tick)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		time.Sleep(2 * tick)
		synctest.Wait()
		assert.Equal(t, lock.ReasonExpired, h.loss().reason)
		assert.Zero(t, s.renewals())
	})
}

func TestNothingBringsBackALeaseThatIsOver(t *testing.T) {
	for what, happens := range map[string]func(d *Dog, h *holder){
		"somebody looks": func(_ *Dog, h *holder) { h.Check() },
		"it is extended": func(_ *Dog, h *holder) { h.Extended(time.Now(), time.Minute) },
		"it was renewed": func(d *Dog, h *holder) {
			h.Lease.mu.Lock()
			h.state = renewing
			h.Lease.mu.Unlock()
			d.settle(&h.Lease, time.Now(), time.Now(), nil, true)
		},
	} {
		t.Run(what, func(t *testing.T) {
			run(t, func(t *testing.T, d *Dog, s *server) {
				h := watch(t, d, "a", Terms{TTL: time.Minute + tick/5})
				time.Sleep(time.Minute + tick/2)
				synctest.Wait()
				require.Zero(t, h.loss().times, "the wheel has come to it")
				happens(d, h)
				assert.Equal(t, lock.ReasonExpired, h.loss().reason)
				assert.Zero(t, h.Remaining())
				time.Sleep(time.Second)
				assert.Equal(t, 1, h.loss().times)
			})
		})
	}
}

func TestMaxHoldEndsALeaseThatIsRenewed(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		h := watch(t, d, "a", Terms{Renewer: s, MaxHold: time.Minute})
		time.Sleep(time.Minute - time.Second)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.LessOrEqual(t, h.Remaining(), time.Second)
		time.Sleep(time.Second + tick)
		synctest.Wait()
		assert.Equal(t, lock.ReasonMaxHold, h.loss().reason)
		before := s.renewals()
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, before, s.renewals())
	})
}

func TestAForgottenLeaseIsNeitherRenewedNorLost(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		early := watch(t, d, "a", Terms{Renewer: s})
		early.Forget()
		s.set(func(s *server) { s.latency, s.gone["b"] = time.Second, true })
		during := watch(t, d, "b", Terms{Renewer: s})
		time.Sleep(timeout/3 + 500*time.Millisecond)
		synctest.Wait()
		require.Equal(t, 1, s.renewals())
		during.Forget() // while its renewal is under way
		during.Forget()
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Zero(t, early.loss().times)
		assert.Zero(t, during.loss().times)
		assert.Equal(t, 1, s.renewals())
		assert.Zero(t, during.Remaining())
	})
}

func TestExtendedLeasesAreNotCutShortByTheirRenewal(t *testing.T) {
	run(t, func(t *testing.T, d *Dog, s *server) {
		h := watch(t, d, "a", Terms{Renewer: s})
		h.Extended(time.Now(), 10*time.Minute)
		time.Sleep(9 * time.Minute)
		synctest.Wait()
		assert.Positive(t, s.renewals()) // so that a loss is noticed
		assert.Greater(t, h.Remaining(), 55*time.Second)
		h.Extended(time.Now(), time.Second)
		assert.Greater(t, h.Remaining(), 55*time.Second)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.Positive(t, s.renewals())
	})
}

func TestCloseTellsEveryHolderOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := NewDog(Config{})
		s := &server{latency: time.Second}
		var all []*holder
		for i := range 50 {
			all = append(all, watch(t, d, fmt.Sprint(i), Terms{Renewer: s}))
		}
		all = append(all, watch(t, d, "fixed", Terms{TTL: time.Hour}))
		forgotten := watch(t, d, "forgotten", Terms{Renewer: s})
		forgotten.Forget()
		time.Sleep(timeout/3 + 100*time.Millisecond) // renewals are under way
		d.Close()
		d.Close()
		for _, h := range all {
			assert.Equal(t, 1, h.loss().times, h.Key)
			assert.Equal(t, lock.ReasonClosed, h.loss().reason)
		}
		assert.Zero(t, forgotten.loss().times)
		var late holder
		assert.False(t, d.Watch(&late.Lease, &late, Terms{Sent: time.Now(), TTL: timeout}))
	})
}

// One node of a cluster that does not answer costs only what lives there.
func TestANodeThatHangsDoesNotStarveTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slot := func(key string) int { // each key has its own
			node, n, _ := strings.Cut(key, " ")
			i, _ := strconv.Atoi(n)
			return 2*i + len(node)%2
		}
		d := NewDog(Config{Slot: slot})
		defer d.Close()
		s := &server{hung: func(key string) bool { return key[0] == 'h' }}
		var healthy, hung []*holder
		for i := range 5_000 {
			for _, node := range []string{"fine", "hangs"} {
				h := watch(t, d, fmt.Sprintf("%s %d", node, i), Terms{Renewer: s})
				if node == "fine" {
					healthy = append(healthy, h)
				} else {
					hung = append(hung, h)
				}
			}
			if i%100 == 0 {
				time.Sleep(50 * time.Millisecond)
			}
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		for _, h := range healthy {
			require.Zero(t, h.loss().times, h.Key)
		}
		for _, h := range hung {
			require.Equal(t, lock.ReasonExpired, h.loss().reason)
		}
	})
}

func TestCloseTellsAHolderWhoseTimerIsFiring(t *testing.T) {
	// The wheel has taken the timer off, and its goroutine is yet to call Expire
	// when the watchdog is closed.
	d := NewDog(Config{})
	h := watch(t, d, "a", Terms{TTL: time.Hour})
	d.wheel.Cancel(&h.timer)
	d.wheel.Stop()
	h.Expire(time.Now())
	d.Close()
	assert.Equal(t, lock.ReasonClosed, h.loss().reason)
}

func TestOnRenewHearsOfSuccessAndFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var left []time.Duration
		var failed int
		d := NewDog(Config{OnRenew: func(remaining time.Duration, err error) {
			if err != nil {
				failed++
				return
			}
			left = append(left, remaining)
		}})
		defer d.Close()
		s := &server{err: errors.New("boom")}
		watch(t, d, "a", Terms{Renewer: s})
		time.Sleep(timeout/3 + tick)
		synctest.Wait()
		s.set(func(s *server) { s.err = nil })
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, 1, failed)
		require.Len(t, left, 1)
		assert.Less(t, left[0], timeout*2/3+time.Second)
	})
}

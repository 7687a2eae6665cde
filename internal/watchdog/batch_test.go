package watchdog

import (
	"errors"
	"fmt"
	"slices"
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

func TestBatchesShareSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slot := func(key string) int { return int(key[0]) }
		wd := New(Config{Slot: slot})
		defer wd.Close()
		s := &server{}
		for i := range 350 {
			watch(t, wd, fmt.Sprintf("%c%d", 'a'+i%2, i), Terms{Renewer: s})
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

func TestRetriesAlternateConnections(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		s.set(func(s *server) { s.err = errors.New("boom") })
		h := watch(t, wd, "a", Terms{Renewer: s})
		for s.renewals() < 4 {
			time.Sleep(tick)
		}
		s.set(func(s *server) { s.err = nil })
		time.Sleep(timeout)
		synctest.Wait()
		assert.Zero(t, h.loss().times)
		assert.Equal(t, []bool{false, true, false, true, false, false}, s.shared[:6])
	})
}

func TestWavesAreBounded(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		s.set(func(s *server) { s.latency = time.Second })
		const leases = 3 * maxWorkers * maxWave / 2
		for i := range leases {
			watch(t, wd, strconv.Itoa(i), Terms{Renewer: s})
		}
		time.Sleep(timeout/3 + 2*time.Second + time.Millisecond) // two waves per worker
		synctest.Wait()
		renewed := 0
		for _, n := range s.waves {
			assert.LessOrEqual(t, n, maxWave)
			renewed += n
		}
		assert.Equal(t, leases, renewed)
		assert.Len(t, s.batches, leases/batchSize)
	})
}

// Heavy leases count for several, and one that exceeds a wave has one for itself.
func TestWavesAreBoundedByWeight(t *testing.T) {
	run(t, func(t *testing.T, wd *Watchdog, s *server) {
		for i := range 12 {
			h := &holder{Subject: Subject{Key: strconv.Itoa(i)}, Lease: Lease{Weight: []uint16{maxWave / 4, 2 * maxWave}[i/8]}}
			require.True(t, wd.Watch(&h.Lease, h, Terms{Sent: time.Now(), TTL: timeout, Renewer: s}))
		}
		time.Sleep(timeout/3 + time.Second)
		synctest.Wait()
		slices.Sort(s.waves)
		assert.Equal(t, []int{1, 1, 1, 1, 4, 4}, s.waves)
	})
}

// A hanging cluster node affects only its own keys.
func TestHangingNodeDoesNotDelayOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slot := func(key string) int { // unique per key
			node, n, _ := strings.Cut(key, " ")
			i, _ := strconv.Atoi(n)
			return 2*i + len(node)%2
		}
		wd := New(Config{Slot: slot})
		defer wd.Close()
		s := &server{hung: func(key string) bool { return key[0] == 'h' }}
		var healthy, hung []*holder
		for i := range 5_000 {
			for _, node := range []string{"fine", "hangs"} {
				h := watch(t, wd, fmt.Sprintf("%s %d", node, i), Terms{Renewer: s})
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

// An error of one lease of a batch is no error of the others. OnRenew hears of it, and then of the shortest time
// that was left in a batch.
func TestErrorsCountPerLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		moving := errors.New("moving")
		var mu sync.Mutex
		left, failures := []time.Duration{}, []error{}
		wd := New(Config{OnRenew: func(remaining time.Duration, err error) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failures = append(failures, err)
				return
			}
			left = append(left, remaining)
		}})
		defer wd.Close()
		s := &server{moving: map[string]error{"b": moving}}
		a, b := watch(t, wd, "a", Terms{Renewer: s}), watch(t, wd, "b", Terms{Renewer: s})

		time.Sleep(timeout/3 + tick)
		synctest.Wait()
		require.Len(t, s.batches, 1, "one batch")
		require.Equal(t, []error{moving}, failures)
		require.Empty(t, left)
		require.Greater(t, a.Remaining(), timeout-time.Second)
		require.Less(t, b.Remaining(), timeout*2/3+time.Second)

		s.set(func(s *server) { s.moving = nil })
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, failures, 1)
		require.Len(t, left, 1)
		require.Less(t, left[0], timeout*2/3+time.Second)
	})
}

package multilock_test

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// redxWorld is five servers, the judge, and processes.
type redxWorld struct {
	t       *testing.T
	judge   *testserver.Server
	servers []*testserver.Server
	gates   [][]*harness.Gate // one set for each process and one for the test; nil without gates
	procs   []*harness.Process
	job     redxJob
	seed    uint64
	late    time.Duration // the longest delay of the test itself, which shows how busy the machine is
}

// redxSettings returns the duration of a test, for a short and for a full run, and its seed.
func redxSettings(t *testing.T, short, full time.Duration) (time.Duration, uint64) {
	seed := rand.Uint64N(1_000_000)
	runFor := time.Duration(harness.Size(int(short), int(full)))
	var err error
	if s := os.Getenv("REDLATCH_RED_FOR"); s != "" {
		runFor, err = time.ParseDuration(s)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_RED_SEED"); s != "" {
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Log("seed", seed)
	return runFor, seed
}

// redxStart starts the servers. With gates set, every process reaches each server through a
// gate of its own. A short run has fewer contenders, which sleep under the lock, to leave time
// for other tests.
func redxStart(t *testing.T, judge *testserver.Server, gates bool, job redxJob) *redxWorld {
	job.Goroutines, job.Rest = harness.Size(4, 16), time.Duration(harness.Size(3, 0))*time.Millisecond
	w := &redxWorld{t: t, judge: judge, job: job, seed: job.Seed}
	harness.Do(t, judge.Addr, "FLUSHALL")
	for range redxServers {
		w.servers = append(w.servers, harness.Own(t, judge.Program))
	}
	for range redxProcesses + 1 {
		var set []*harness.Gate
		for _, s := range w.servers {
			if gates {
				set = append(set, harness.NewGate(t, s))
			}
		}
		w.gates = append(w.gates, set)
	}
	w.job.Judge = judge.Addr
	w.procs = make([]*harness.Process, redxProcesses)
	return w
}

// addrs returns the addresses by which a process reaches the servers.
func (w *redxWorld) addrs(process int) []string {
	var addrs []string
	for i, s := range w.servers {
		if set := w.gates[process]; set != nil {
			addrs = append(addrs, set[i].Addr)
		} else {
			addrs = append(addrs, s.Addr)
		}
	}
	return addrs
}

// spawn starts a process, which works once it is told to.
func (w *redxWorld) spawn(process int) {
	w.t.Helper()
	job := w.job
	job.Servers, job.Number = w.addrs(process), process
	text, err := json.Marshal(job)
	require.NoError(w.t, err)
	w.procs[process] = harness.Spawn(w.t, "red-contend", string(text))
	require.Equal(w.t, "ready", w.procs[process].Line(30*time.Second))
}

// begin starts all processes and lets them work.
func (w *redxWorld) begin() {
	w.t.Helper()
	for i := range w.procs {
		w.spawn(i)
	}
	harness.Do(w.t, w.judge.Addr, "SET", redxGo, "1")
}

// shares returns the number of writes of each process and of the test.
func (w *redxWorld) shares() (shares [redxProcesses + 1]int) {
	reply, err := testserver.Query(w.judge.Addr, "HGETALL", redxShares)
	require.NoError(w.t, err)
	for i := 0; i+1 < len(reply); i += 2 {
		process, errProcess := strconv.Atoi(reply[i])
		n, err := strconv.Atoi(reply[i+1])
		require.NoError(w.t, errors.Join(errProcess, err))
		shares[process] = n
	}
	return shares
}

// all waits until every process has held the lock again.
func (w *redxWorld) all() {
	w.t.Helper()
	before := w.shares()
	harness.Eventually(w.t, 5*w.job.longest()+multiSlack, "all processes make progress", func() bool {
		shares := w.shares()
		for i, n := range shares[:redxProcesses] {
			if n == before[i] {
				return false
			}
		}
		return true
	})
}

// watch waits until done is closed or the judge has detected a violation. It returns the
// longest times without progress, of all and of each process, without the delays of the
// machine, which are in w.late.
func (w *redxWorld) watch(done <-chan struct{}) (gap time.Duration, each [redxProcesses]time.Duration) {
	const pause = 20 * time.Millisecond
	shares := w.shares()
	var last [redxProcesses]time.Time
	lastOfAll := time.Now()
	for i := range last {
		last[i] = lastOfAll
	}
	for over := false; !over; {
		looked := time.Now()
		select {
		case <-done:
			over = true
		case <-time.After(pause):
		}
		now, next := time.Now(), w.shares()
		w.late = max(w.late, time.Since(looked)-pause)
		gap = max(gap, now.Sub(lastOfAll))
		for i := range each {
			each[i] = max(each[i], now.Sub(last[i]))
			if next[i] != shares[i] {
				last[i], lastOfAll = now, now
			}
		}
		shares = next
		if harness.Do(w.t, w.judge.Addr, "LLEN", redxViolations) != ":0" {
			break
		}
	}
	return gap, each
}

// verdict fails the test if the judge has detected a violation or a write was lost.
func (w *redxWorld) verdict() {
	w.t.Helper()
	seen, err := testserver.Query(w.judge.Addr, "LRANGE", redxViolations, "0", "9")
	require.NoError(w.t, err)
	require.Empty(w.t, seen, "two holders at once, seed %d", w.seed)
	get := func(key string) string {
		reply, err := testserver.Query(w.judge.Addr, "GET", key)
		require.NoError(w.t, err)
		return reply[0]
	}
	require.Equal(w.t, get(redxWrites), get(redxCounter))
	require.NotEqual(w.t, "0", get(redxWrites))
}

// end stops all processes and returns their reports. Nothing may be left on the servers then.
func (w *redxWorld) end() []redxReport {
	w.t.Helper()
	harness.Do(w.t, w.judge.Addr, "SET", redxStop, "1")
	reports := make([]redxReport, len(w.procs))
	for i, p := range w.procs {
		require.NoError(w.t, json.Unmarshal([]byte(p.Line(30*time.Second)), &reports[i]))
		// A majority is silent while the machine is busy for longer than a server has time to answer.
		if w.late < w.job.Lease/20 {
			assert.Empty(w.t, reports[i].Errors, "process %d", i)
		}
	}
	// The processes still run, so their background releases complete.
	for _, s := range w.servers {
		harness.NothingStays(w.t, s.Addr)
	}
	harness.Do(w.t, w.judge.Addr, "SET", redxBye, "1")
	for _, p := range w.procs {
		p.Ended(30 * time.Second)
	}
	return reports
}

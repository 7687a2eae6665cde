package robustness

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]func(args []string) error{
		"contend": process(contend), "schedule": process(schedule), "ask": process(ask),
	})
}

const (
	workers    = 3 // at a time
	roundTime  = 3 * time.Second
	mostFaults = 8 // of a round
	// smoke is the duration of a short run: enough for faults and for holds of every kind,
	// even if a fault or two keep all workers from them.
	smoke  = 12 * time.Second
	enough = 5
	// longRun is long enough for every kind of event. A longer run consists of such runs.
	longRun = time.Minute
	// lastWorker is the worker that acquires all locks at the end of a round.
	lastWorker = "last"
	// endTime is the time that workers may need after a round for the last Lock and to release
	// their holds.
	endTime = time.Minute
)

// settings are read from the environment.
func settings(t *testing.T) (runFor time.Duration, seed uint64, dir string) {
	runFor, seed = longRun, uint64(time.Now().UnixMilli())
	if testing.Short() {
		runFor = smoke
	}
	for faults := 0; faults == 0; { // its round may be the only one
		seed++
		faults, _ = draw(seed, mostFaults)
	}
	var err error
	if s := os.Getenv("REDLATCH_ROBUSTNESS_FOR"); s != "" {
		runFor, err = time.ParseDuration(s)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_ROBUSTNESS_SEED"); s != "" {
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	if dir = os.Getenv("REDLATCH_ROBUSTNESS_DIR"); dir == "" {
		dir = os.TempDir()
	}
	return runFor, seed, dir
}

// round is a few seconds of contention for new locks.
type round struct {
	seed   uint64
	server *testserver.Server
	links  []*link       // of each worker
	dir    string        // of the journals
	faults int           // at most
	only   string        // the only fault, or ""
	time   time.Duration // 0: roundTime
	far    bool          // whether some workers are far from the server
}

// run runs the round and returns its history.
func (r *round) run(t *testing.T) *history {
	require.NoError(t, create(t.Context(), r.server.Addr, r.seed, true))
	// A wipe deletes the semaphores too. The latches stay open.
	n := r.disturb(t, "contend", func() error { return create(t.Context(), r.server.Addr, r.seed, false) })
	c, err := connect(t.Context(), r.server.Addr)
	require.NoError(t, err)
	defer c.Close()
	h := r.history(t, n)
	wrongs := r.takeAll(t, c, h)
	h = r.history(t, n) // with what takeAll has done
	h.atEnd = append(wrongs, h.countPermits(t, c, r.seed)...)
	r.clear(t)
	return h
}

// disturb runs worker processes of that name, one for each link, while the nemesis acts.
// It calls restore when the server has lost its data.
func (r *round) disturb(t *testing.T, worker string, restore func() error) *nemesis {
	j, err := openJournal(filepath.Join(r.dir, "nemesis"+journalExt))
	require.NoError(t, err)
	defer j.close()
	until := time.Now().Add(cmp.Or(r.time, roundTime))
	end := clock() + int64(time.Until(until))
	spawned := 0
	count, rng := draw(r.seed, r.faults)
	n := &nemesis{
		t: t, rng: rng, server: r.server, links: r.links, seed: r.seed, journal: j, only: r.only, restore: restore,
		spawn: func(i int) *harness.Process {
			spawned++
			var rtt time.Duration
			if r.far {
				rtt = distance(r.seed, i)
			}
			return harness.Spawn(t, worker, r.links[i].addr(), r.dir, fmt.Sprint(r.seed), fmt.Sprint(spawned), fmt.Sprint(end),
				r.server.Addr, rtt.String(), fmt.Sprint(r.far))
		},
	}
	if r.far && slices.Contains(focusOf(r.seed), "left") {
		n.prefer = silenceWorker // only this one makes the outcome of Detach unknown in time
	}
	for i, l := range r.links {
		l.far(0)
		if r.far {
			l.far(distance(r.seed, i))
		}
		n.workers = append(n.workers, n.spawn(i))
	}
	n.run(until, count)
	t.Logf("faults: %s", strings.Join(n.log, ", "))
	for _, w := range n.workers {
		w.Ended(endTime)
	}
	return n
}

// history returns what the journals of the round contain.
func (r *round) history(t *testing.T, n *nemesis) *history {
	events, err := readJournals(r.dir)
	require.NoError(t, err)
	h := newHistory(events)
	h.faults = len(n.log)
	return h
}

// newLinks returns a link for each of n workers.
func newLinks(t *testing.T, s *testserver.Server, n int, rewrite func([]byte) []byte) []*link {
	links := make([]*link, n)
	for i := range links {
		l, err := newLink(s.Addr, rewrite)
		require.NoError(t, err)
		t.Cleanup(l.close)
		links[i] = l
	}
	return links
}

func TestHistories(t *testing.T) {
	histories(t, workers, (*round).run, totals.addHolds, holdsWanted)
}

func TestSlots(t *testing.T) {
	histories(t, schedulers, (*round).runSlots, totals.addRuns, runsWanted)
}

// histories runs rounds with that many workers on each server.
func histories(
	t *testing.T, workers int, run func(*round, *testing.T) *history, add func(totals, *history), wanted func(runFor time.Duration) map[string]int,
) {
	runFor, seed, dir := settings(t)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		seed := seed
		for left, ok := runFor, true; left > 0 && ok; left -= longRun {
			ok = t.Run(fmt.Sprintf("from %d", seed), func(t *testing.T) {
				s, runFor := harness.Own(t, shared.Program), min(left, longRun)
				t.Logf("from seed %d, for %v, on %s", seed, runFor, s.Program)
				links := newLinks(t, s, workers, nil)
				sum, begin, first := totals{}, time.Now(), seed
				goOn := func() bool {
					soFar := time.Since(begin)
					// Some events are rare.
					return seed == first || soFar < runFor || soFar < 5*runFor && len(sum.missing(wanted(runFor))) > 0
				}
				for ok := true; ok && goOn(); seed++ {
					ok = t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
						dir := journals(t, dir)
						h := run(&round{seed: seed, server: s, links: links, dir: dir, faults: mostFaults, far: true}, t)
						add(sum, h)
						for _, w := range h.check(dir, checkTimeout) {
							assert.Fail(t, w, "seed %d on %s, journals in %s", seed, s.Program, dir)
						}
					})
				}
				t.Logf("in %v: %d rounds, %v", time.Since(begin).Round(time.Second), seed-first, sum)
				if t.Failed() {
					return
				}
				assert.Empty(t, sum.missing(wanted(runFor)), "is missing from the run")
				harness.NothingStays(t, s.Addr)
			})
		}
	})
}

// journals returns a new directory, which is kept if the test fails.
func journals(t *testing.T, parent string) string {
	dir, err := os.MkdirTemp(parent, "redlatch-robustness-")
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("journals in %s", dir)
		} else {
			_ = os.RemoveAll(dir)
		}
	})
	return dir
}

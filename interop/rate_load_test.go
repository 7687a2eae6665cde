package interop

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/ratelimit"
)

var rateFor = flag.Duration("rate-for", 0, "measure TestRateUnderLoad for so long, and require that 99% of the rate is used")

// The load of TestRateUnderLoad.
const (
	loadRate    = 500
	loadPer     = time.Second
	loadCallers = 16 // of each process
	loadMost    = 5  // permits of a request
)

// workers are what processes of this test program do.
var workers = map[string]func(args []string) error{"rate": rateWorker}

// waits are those of the callers of a process.
type waits struct {
	mu      sync.Mutex
	all     []time.Duration
	permits int
}

func (w *waits) add(d time.Duration, permits int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, d)
	w.permits += permits
}

// text returns a line about the waits.
func (w *waits) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.all) == 0 {
		return "nothing"
	}
	slices.Sort(w.all)
	at := func(q float64) time.Duration {
		return w.all[int(q*float64(len(w.all)-1))].Round(time.Millisecond)
	}
	return fmt.Sprintf("%d permits in %d requests; p50 %v, p99 %v, longest %v", w.permits, len(w.all), at(0.5), at(0.99), at(1))
}

// contend has callers acquire permits until the end.
func (w *waits) contend(until time.Time, acquire func(n int) error) (err error) {
	var all sync.WaitGroup
	var once sync.Once
	for i := range loadCallers {
		all.Go(func() {
			for n := 1 + i%loadMost; time.Now().Before(until); {
				asked := time.Now()
				if failure := acquire(n); failure != nil {
					once.Do(func() { err = failure })
					return
				}
				w.add(time.Since(asked), n)
			}
		})
	}
	all.Wait()
	return err
}

// rateWorker acquires permits of the limiter with the name that is its second argument, on the server of the first,
// until the time that is the third. It prints what it has waited.
func rateWorker(args []string) error {
	until, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.Open(ctx, args[0])
	if err != nil {
		return err
	}
	l := c.RateLimiter(args[1])
	var w waits
	if err := w.contend(time.Unix(0, until), func(n int) error { return l.Acquire(ctx, n) }); err != nil {
		return err
	}
	fmt.Println(w.text())
	return nil
}

// Two processes of each language use one limiter. Each asks for more permits than there are.
func TestRateUnderLoad(t *testing.T) {
	length := time.Duration(harness.Size(3, 10)) * time.Second
	if *rateFor > 0 {
		length = *rateFor
	}
	harness.EachAlone(t, func(t *testing.T, s *testserver.Server) {
		p := at(t, newest, s)
		name := "orders of " + t.Name()
		set, err := p.ours(t).RateLimiter(name).TrySetRate(t.Context(), ratelimit.Config{Rate: loadRate, Per: loadPer})
		require.NoError(t, err)
		require.True(t, set)
		java := []*redisson{p.theirs(t), launch(t, newest).client(t, p)}
		for _, c := range java { // the virtual machine is warm
			c.on(t, "rate", name, "acquireAsync", 1).must(t, nil)
		}
		permits := wire.RatePermits(name)
		m := newMonitor(t, s.Addr, func(c monitored) bool {
			command := strings.ToUpper(c.words[0])
			return command == "ECHO" || (command == "ZADD" || command == "ZREM") && c.words[1] == permits
		})

		until := time.Now().Add(length)
		var ours []*harness.Process
		for range 2 {
			ours = append(ours, harness.Spawn(t, "rate", s.URL(), name, strconv.FormatInt(until.UnixNano(), 10)))
		}
		h := acquisitions{}
		var all sync.WaitGroup
		theirs := make([]waits, len(java))
		for i, c := range java {
			all.Go(func() {
				err := theirs[i].contend(until, func(n int) error {
					a := <-c.on(t, "rate", name, "acquireAsync", n).done
					if a.Error != "" {
						return &javaError{a.Error, a.Message}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		for time.Now().Before(until) {
			time.Sleep(min(time.Second, time.Until(until)))
			h.add(t, m.since(t))
		}
		all.Wait()
		for i := range java {
			t.Logf("Redisson: %s", theirs[i].text())
		}
		for _, p := range ours {
			t.Logf("redlatch: %s", p.Line(answers))
			p.Ended(answers)
		}
		h.add(t, m.since(t))

		used := h.requireLimit(t, until)
		if *rateFor > 0 {
			require.GreaterOrEqual(t, used, 0.99)
		}
	})
}

// acquisitions are the entries of a limiter, by their names.
type acquisitions map[string]acquisition

type acquisition struct {
	at      int64 // the time that it has, in ms
	late    int64 // how much later the server got it
	permits int64
}

// add adds what a monitor has seen.
func (h acquisitions) add(t testing.TB, seen []monitored) {
	t.Helper()
	for _, c := range seen {
		switch command := strings.ToUpper(c.words[0]); command {
		case "ZREM": // a request that was undone
			for _, entry := range c.words[2:] {
				delete(h, entry)
			}
		case "ZADD":
			pairs := c.words[2:]
			if pairs[0] == "XX" {
				pairs = pairs[1:]
			}
			for i := 0; i+1 < len(pairs); i += 2 {
				at, err := strconv.ParseInt(pairs[i], 10, 64)
				require.NoError(t, err)
				require.Len(t, pairs[i+1], 21)
				h[pairs[i+1]] = acquisition{at, c.at - at, int64(binary.LittleEndian.Uint32([]byte(pairs[i+1][17:])))}
			}
		}
	}
}

// requireLimit fails the test unless no window has more permits than the rate, and returns which part of the rate was
// used until then. Redisson stamps a request with the time at which it sends it, so permits that it adds late may be in a
// window that was full by then. A window is shorter by as much as the server was behind.
func (h acquisitions) requireLimit(t testing.TB, until time.Time) (used float64) {
	t.Helper()
	all := make([]acquisition, 0, len(h))
	late := int64(0)
	for _, a := range h {
		all = append(all, a)
		late = max(late, a.late)
	}
	slices.SortFunc(all, func(a, b acquisition) int { return int(a.at - b.at) })
	require.NotEmpty(t, all)

	most := func(window int64) (most int64) {
		sum, oldest := int64(0), 0
		for _, a := range all {
			for sum += a.permits; all[oldest].at <= a.at-window; oldest++ {
				sum -= all[oldest].permits
			}
			most = max(most, sum)
		}
		return most
	}
	ms := loadPer.Milliseconds()
	windows := (until.UnixMilli() - all[0].at) / ms // that are over
	total := int64(0)
	for _, a := range all {
		if a.at < all[0].at+windows*ms {
			total += a.permits
		}
	}
	used = float64(total) / float64(loadRate*windows)
	t.Logf("%d permits in %d windows, %.2f%% of the rate; %d at most in a window, and %d in one that is shorter by %d ms",
		total, windows, 100*used, most(ms), most(ms-late), late)
	require.LessOrEqual(t, most(ms-late), int64(loadRate))
	return used
}

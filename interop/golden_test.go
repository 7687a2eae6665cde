package interop

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

var update = flag.Bool("update", false, "write what is recorded to testdata/traces")

// traceName is the name of whatever is recorded.
const traceName = "orders"

// Leases that are recorded as they are: what is left of them is rounded up to tens of
// seconds, and no recording takes as long as that.
const (
	minute     = time.Minute
	tenMinutes = 10 * time.Minute
	moment     = 200 * time.Millisecond // of leases that are to be over
)

// difference is something that redlatch does on purpose as Redisson does not. Its name
// is explained in docs/compatibility.md.
type difference struct {
	name string
	// where matches the lines it explains: "kind, scenario: step: - line" where the newest
	// Redisson has the line and redlatch has not, with a plus the other way round.
	where *regexp.Regexp
}

// differs returns a difference: patterns of the scenario, the step and the line.
func differs(name, scenario, step, line string) difference {
	return difference{name, regexp.MustCompile(`^(?:` + scenario + `): (?:` + step + `): (?:` + line + `)$`)}
}

const (
	every = `.*`
	once  = `.*, one owner each`
	fairs = `(?:non-reentrant )?fair, .*`
)

// differences explain all lines that differ. The first that matches counts.
var differences = []difference{
	differs("ticket", every, every, `\+ redisson_unlock_latch:.*: held, .*`),
	differs("nothing-to-release", `(?:`+fairs+`|read, .*|write, .*)`, `.* (?:what nobody has|what is over)`,
		`- -> released|- remembers .*|- publishes .*|\+ -> not held`),
	differs("lost", every, `.* what is over`, `- -> not held|\+ -> lost`),
	differs("no-unlock-latch", once, every, `- remembers .*`),
	differs("hand-off", once+`|semaphore, .*`, `.* gets? .*`, `- publishes .*`),
	differs("lease-kept", `(?:lock|fenced|spin|fair), threads`, `1 locks again, for 1 min`, `- orders: hash, 60s|\+ orders: hash, 600s`),
	differs("lease-kept", every, `1 unlocks one of .*`, `- orders: hash, 30s|\+ orders: hash, 600s`),
	differs("write-lease", `write, threads`, `1 locks again, .*`, `- orders: hash, 6[39]0s|\+ orders: hash, 600s`),
	differs("write-lease", `write, .*`, `1 gives one of two read holds back`, `- orders: hash, 60s|\+ orders: hash, 600s`),
	differs("queue-expires", fairs, every, `- redisson_lock_(?:queue|timeout):.*, stays|\+ redisson_lock_(?:queue|timeout):.* (?:list|zset), expires`),
	differs("deadlines", fairs, every, `[-+] redisson_lock_timeout:.* at now \+ .*`),
	differs("signs-of-life", fairs, every, `\+ redlatch_lock_alive:.*`),
	differs("new-head", fairs, `2 gives up`, `\+ publishes .*:<client>:3 0`),
	differs("upgrade", `read, .*`, `1 tries to write`, `- -> refused|\+ -> refused: it would wait for itself`),
	differs("waiting-writers", `read, .*`, every, `\+ redlatch_rwlock_writer:.*`),
	differs("read-holds-go", `read, threads`, every, `- \{orders\}:<client>:1:rwlock_timeout:1: .*`),
	differs("downgrade", `write, .*`, `1 gives the write hold back.*`, `\+ publishes .* 1`),
	differs("request-numbers", `(?:semaphore|permits), .*`, every, `\+ redlatch_sc_request:.*`),
	differs("line", `semaphore, .*`, every, `\+ redlatch_sc_(?:waiting|alive):.*`),
	differs("time-to-live", `semaphore, .*`, every, `- orders: string, stays|\+ orders: string, 60s`),
	differs("nothing-to-tell", `semaphore, .*`, every, `- publishes .* -\d`),
	differs("nothing-to-tell", `permits, .*`, `there are to be 3 .*`, `- publishes .* 3`),
	differs("renewed-permits", `permits, .*`, every, `- \{orders\}:timeout: <16 bytes> at never|\+ \{orders\}:timeout: <16 bytes> at now \+ 30s`),
	differs("told-what-is-left", `permits, .*`, `.* is taken where one .*`, `[-+] publishes .*`),
	differs("reads-write-nothing", `permits, .*`, `how many are free where one is over`, `- publishes .*|[-+] orders: \d|\+ .* is past`),
	differs("expired-permits", `permits, .*`, `what is over .*`, `- publishes .*|[-+] orders: \d|\+ .* is past`),
	differs("rounds", `latch, .*`, every, `\+ redlatch_latch_round:.*`),
	differs("zero-counts", `latch, .*`, `2 are set where a zero is stored`, `[-+] .*`),
}

// traced is what a step of a scenario has come to.
type traced struct {
	what  string
	lines []string
}

// recorder writes down what a side does to the servers, step by step.
type recorder struct {
	t        *testing.T
	p        *place
	side     side
	conn     rueidis.Client
	monitors []*monitor
	// fresh is set where every acquisition has an owner of its own: then nobody's
	// number is told from another's.
	fresh bool
	// loose is set where somebody has left a queue of ours: those behind learn of it
	// with their next sign of life, and only then are their deadlines less.
	loose bool
	steps []traced
}

// scenario is what a kind of object is recorded at.
type scenario struct {
	title string
	fresh bool
	run   func(r *recorder)
}

// record plays a scenario on empty servers.
func record(t *testing.T, p *place, s side, sc scenario) []traced {
	t.Helper()
	r := &recorder{t: t, p: p, side: s, conn: p.conn(t), fresh: sc.fresh}
	for _, server := range p.servers {
		harness.Do(t, server.Addr, "FLUSHALL")
		r.monitors = append(r.monitors, newMonitor(t, server.Addr, func(monitored) bool { return true }))
	}
	sc.run(r)
	require.Empty(t, r.told(), "after the last step")
	return r.steps
}

// step has the side do something and writes down the reply, what it published and
// remembered, and the keys there are once settled holds.
func (r *recorder) step(what string, act func() string, settled ...func() bool) {
	r.t.Helper()
	lines := []string{"-> " + act()}
	harness.Eventually(r.t, answers, what+" is settled", func() bool {
		for _, s := range settled {
			if !s() {
				return false
			}
		}
		// What is remembered of an unlock is deleted when that was answered. Not so by
		// Redisson 3.52, which deletes a key that is none.
		for _, key := range r.keys() {
			if r.ended(key) && !r.leaves() {
				return false
			}
		}
		return true
	})
	lines = append(lines, r.told()...)
	r.steps = append(r.steps, traced{what, append(lines, r.state()...)})
}

// told returns what has been published and remembered since it was called last.
func (r *recorder) told() (lines []string) {
	r.t.Helper()
	for _, m := range r.monitors {
		for _, c := range m.since(r.t) {
			switch name := strings.ToUpper(c.words[0]); {
			case name == "PUBLISH" || name == "SPUBLISH":
				require.Equal(r.t, r.p.cluster, name == "SPUBLISH", "%s", c.words)
				lines = append(lines, "publishes "+r.text(c.words[1])+" "+c.words[2])
			case name == "SET" && strings.HasPrefix(c.words[1], "redisson_unlock_latch:") && c.words[2] != "held":
				require.Len(r.t, c.words, 5)
				ms, err := strconv.ParseInt(c.words[4], 10, 64)
				require.NoError(r.t, err)
				line := "remembers " + r.text(c.words[1]) + " = " + c.words[2] + " for " + tens(ms)
				if !r.gone(c.words[1])() {
					line += ", and leaves it"
				}
				lines = append(lines, line)
			}
		}
	}
	return lines
}

// ended reports whether a key remembers an unlock. Those of redlatch that say "held" are
// of holds.
func (r *recorder) ended(key string) bool {
	if !strings.HasPrefix(key, "redisson_unlock_latch:") {
		return false
	}
	v, _ := do(r.t, r.conn, "GET", key).ToString()
	return v != "held"
}

// leaves reports whether the side does not delete such keys.
func (r *recorder) leaves() bool {
	_, java := r.side.(javaSide)
	return java && r.p.version == before
}

// keys returns all keys, sorted.
func (r *recorder) keys() []string {
	var keys []string
	for _, s := range r.p.servers {
		some, err := testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(r.t, err)
		keys = append(keys, some...)
	}
	slices.Sort(keys)
	return keys
}

// queueKeys are those of a fair lock: the queue, the deadlines, the signs of life.
var queueKeys = []string{
	"redisson_lock_queue:{" + traceName + "}", "redisson_lock_timeout:{" + traceName + "}", "redlatch_lock_alive:{" + traceName + "}",
}

// state describes all keys and what is in them.
func (r *recorder) state() []string {
	now := time.Now().UnixMilli() // the servers run here
	var blocks [][]string
	list := func(command, key string, args ...string) []string {
		values, err := do(r.t, r.conn, append([]string{command, key}, args...)...).AsStrSlice()
		require.NoError(r.t, err)
		return values
	}
	for _, key := range r.keys() {
		if r.ended(key) {
			continue // it was told of in its step
		}
		kind, err := do(r.t, r.conn, "TYPE", key).ToString()
		require.NoError(r.t, err)
		ttl, err := do(r.t, r.conn, "PTTL", key).AsInt64()
		require.NoError(r.t, err)
		name := r.text(key)
		var lines []string
		add := func(format string, args ...any) { lines = append(lines, name+": "+fmt.Sprintf(format, args...)) }
		life := "stays"
		if ttl != -1 {
			life = tens(ttl)
		}
		if ttl != -1 && slices.Contains(queueKeys, key) {
			life = "expires" // when, is stated anew with each sign of life
		}
		if kind != "string" || key == traceName {
			add("%s, %s", kind, life)
		}
		switch kind {
		case "string":
			value, err := do(r.t, r.conn, "GET", key).ToString()
			require.NoError(r.t, err)
			switch {
			case strings.HasPrefix(key, "redlatch_latch_round:"):
				value = "<round>"
			case strings.HasPrefix(key, "redlatch_sc_request:"):
				value = "<number and reply>"
			}
			if key == traceName {
				add("%s", r.text(value))
			} else {
				add("%s, %s", r.text(value), life)
			}
		case "hash":
			fields, err := do(r.t, r.conn, "HGETALL", key).AsStrMap()
			require.NoError(r.t, err)
			for field, value := range fields {
				add("%s = %s", r.text(field), value)
			}
		case "list":
			for i, member := range list("LRANGE", key, "0", "-1") {
				add("%d. %s", i+1, r.text(member))
			}
		case "none": // it has expired since
			continue
		case "set":
			for _, member := range list("SMEMBERS", key) {
				add("%s", r.text(member))
			}
		case "zset":
			scores, err := do(r.t, r.conn, "ZRANGE", key, "0", "-1", "WITHSCORES").AsZScores()
			require.NoError(r.t, err)
			for _, s := range scores {
				switch {
				case s.Score == 922337203685477:
					add("%s at never", r.text(s.Member))
				case key == queueKeys[1] && r.loose && int64(s.Score)-now > 299_000 && int64(s.Score)-now < 1_201_000:
					add("%s at now + a wait or two", r.text(s.Member))
				case int64(s.Score) <= now:
					add("%s is past", r.text(s.Member))
				default:
					add("%s at now + %s", r.text(s.Member), tens(int64(s.Score)-now))
				}
			}
		default:
			require.Fail(r.t, "what is a "+kind)
		}
		slices.Sort(lines[1:])
		blocks = append(blocks, lines)
	}
	// What is random in their keys does not order them.
	slices.SortFunc(blocks, slices.Compare)
	return slices.Concat(blocks...)
}

// tens rounds up to tens of seconds. What was set at most that long ago gives the same.
func tens(ms int64) string {
	return fmt.Sprintf("%ds", (ms+9_950)/10_000*10)
}

var (
	randomID    = regexp.MustCompile(`[0-9a-f]{32}`)
	lane        = regexp.MustCompile(`^(redlatch_sc_request:.*:)\d+$`)
	ownerNumber = regexp.MustCompile(`<client>:\d+`)
)

// text takes out of a key or value what is different each time.
func (r *recorder) text(s string) string {
	s = randomID.ReplaceAllString(strings.ReplaceAll(s, r.side.id(), "<client>"), "<id>")
	s = lane.ReplaceAllString(s, "$1<lane>")
	if r.fresh {
		s = ownerNumber.ReplaceAllString(s, "<client>:<n>")
	}
	if len(s) == 16 && strings.ContainsFunc(s, func(c rune) bool { return c > '~' || c < ' ' }) {
		s = "<16 bytes>"
	}
	return s
}

// gone, waitingWriter and queued are what a step waits for: that a key is gone, a writer
// of ours keeps readers out, so many wait for a fair lock.
func (r *recorder) gone(key string) func() bool {
	return func() bool {
		n, err := do(r.t, r.conn, "EXISTS", key).AsInt64()
		return err == nil && n == 0
	}
}

// parked reports whether somebody waits and has no attempt to make, not even when its
// subscription is confirmed. Nobody can tell of Java.
func (r *recorder) parked() bool {
	g, ours := r.side.(goSide)
	if !ours {
		return true
	}
	parked := func() bool {
		s := g.c.Stats()
		return s.Waiting > 0 && s.Attempting == 0
	}
	if !parked() {
		return false
	}
	channels := g.c.PubSub()
	return channels.Subscribed == channels.Channels && parked()
}

func (r *recorder) waitingWriter() bool {
	return !r.gone("redlatch_rwlock_writer:{" + traceName + "}")()
}

func (r *recorder) queued(n int64) func() bool {
	return func() bool {
		length, err := do(r.t, r.conn, "LLEN", queueKeys[0]).AsInt64()
		return err == nil && length == n
	}
}

// takes says what comes of taking a lock.
func (r *recorder) takes(d door, thread uint64, wait, lease time.Duration) string {
	r.t.Helper()
	return r.outcome(d.take(r.t, thread, wait, lease))
}

func (r *recorder) outcome(e *entry) string {
	r.t.Helper()
	got, _, err := e.outcome(r.t, answers)
	switch {
	case errors.Is(err, lock.ErrNotHeld), errors.Is(err, lock.ErrReentered):
		return "refused: it has it already"
	case errors.Is(err, lock.ErrUpgrade):
		return "refused: it would wait for itself"
	}
	require.NoError(r.t, err)
	if !got {
		return "refused"
	}
	return "acquired"
}

// gives says what comes of releasing a lock.
func (r *recorder) gives(d door, thread uint64) string {
	r.t.Helper()
	var held lock.Hold
	if g, ours := d.(*goDoor); ours {
		held = g.latest(thread) // which knows if it was lost, also for a named owner
	}
	var err error
	if held != nil {
		err = held.Unlock(context.Background())
	} else {
		err = d.release(r.t, thread)
	}
	switch {
	case errors.Is(err, lock.ErrLost):
		return "lost"
	case errors.Is(err, lock.ErrNotHeld):
		return "not held"
	}
	require.NoError(r.t, err)
	return "released"
}

// takesStep, givesStep and forceStep are the usual steps.
func (r *recorder) takesStep(what string, d door, thread uint64, wait, lease time.Duration) {
	r.t.Helper()
	r.step(what, func() string { return r.takes(d, thread, wait, lease) })
}

func (r *recorder) givesStep(what string, d door, thread uint64) {
	r.t.Helper()
	r.step(what, func() string { return r.gives(d, thread) })
}

func (r *recorder) forceStep(what string, d door) {
	r.t.Helper()
	r.step(what, func() string { return fmt.Sprint(d.force(r.t)) })
}

// waitsStep begins to wait for a lock.
func (r *recorder) waitsStep(what string, d door, thread uint64, wait, lease time.Duration, settled ...func() bool) *entry {
	r.t.Helper()
	var e *entry
	r.step(what, func() string {
		e = d.take(r.t, thread, wait, lease)
		return "waits"
	}, append(settled, r.parked)...)
	return e
}

// passesStep releases a lock that somebody waits for.
func (r *recorder) passesStep(what string, d door, thread uint64, to *entry, settled ...func() bool) {
	r.t.Helper()
	r.step(what, func() string { return r.gives(d, thread) + "; next: " + r.outcome(to) }, settled...)
}

// exclusive records a lock with threads, which may re-enter.
func exclusive(kind string) scenario {
	return scenario{title: "threads", run: func(r *recorder) {
		d := r.side.lock(kind, traceName)
		r.takesStep("1 locks", d, 1, forever, 0)
		r.takesStep("2 tries", d, 2, 0, 0)
		r.givesStep("2 unlocks", d, 2)
		if strings.HasPrefix(kind, "non-reentrant") {
			r.takesStep("1 locks again", d, 1, forever, 0)
		} else {
			r.takesStep("1 locks again, for 10 min", d, 1, forever, tenMinutes)
			r.takesStep("1 locks again, for 1 min", d, 1, forever, minute)
			r.givesStep("1 unlocks one of three", d, 1)
			r.givesStep("1 unlocks one of two", d, 1)
		}
		r.givesStep("1 unlocks", d, 1)
		r.givesStep("1 unlocks what nobody has", d, 1)
		r.takesStep("1 locks for 1 min", d, 1, forever, minute)
		fair := strings.HasSuffix(kind, "fair")
		queued := func(n int64) []func() bool {
			if fair {
				return []func() bool{r.queued(n)}
			}
			return nil
		}
		two := r.waitsStep("2 waits", d, 2, forever, 0, queued(1)...)
		r.passesStep("1 unlocks, 2 gets it", d, 1, two)
		r.forceStep("unlock by force", d)
		r.forceStep("unlock by force, again", d)
		r.step("3 locks for a moment, which passes", func() string { return r.takes(d, 3, forever, moment) }, r.gone(traceName))
		r.givesStep("3 unlocks what is over", d, 3)
		if kind != "fair" {
			return // the queue of the other kind is the same
		}
		_, ours := r.side.(goSide)
		r.takesStep("1 locks for 10 min", d, 1, forever, tenMinutes)
		two = r.waitsStep("2 waits in line", d, 2, forever, minute, r.queued(1))
		three := r.waitsStep("3 waits in line", d, 3, forever, minute, r.queued(2))
		r.step("4 waits for a moment in vain", func() string { return r.takes(d, 4, 2*moment, 0) }, r.queued(2))
		r.takesStep("5 tries behind them", d, 5, 0, 0)
		r.loose = ours
		r.step("unlock by force, 2 gets it", func() string { return fmt.Sprint(d.force(r.t)) + "; next: " + r.outcome(two) }, r.queued(1))
		r.passesStep("2 unlocks, 3 gets it", d, 2, three, r.queued(0))
		r.givesStep("3 unlocks", d, 3)
		r.loose = false
		r.takesStep("1 locks for 4.9 s", d, 1, forever, 4900*time.Millisecond)
		two = r.waitsStep("2 waits for 1 s", d, 2, time.Second, 0, r.queued(1))
		three = r.waitsStep("3 waits behind it", d, 3, forever, 0, r.queued(2))
		r.loose = ours
		r.step("2 gives up", func() string { return r.outcome(two) }, r.queued(1))
		r.passesStep("1 unlocks, 3 gets it", d, 1, three, r.queued(0))
		r.givesStep("3 unlocks at last", d, 3)
	}}
}

// anonymous records a lock whose owners hold it once.
func anonymous(kind string) scenario {
	return scenario{title: "one owner each", fresh: true, run: func(r *recorder) {
		d, other := r.side.lock(kind, traceName), r.side.lock(rival(kind), traceName)
		r.takesStep("1 locks", d, 1, forever, 0)
		r.takesStep("2 tries", other, 2, 0, 0)
		r.givesStep("1 unlocks", d, 1)
		r.takesStep("1 locks for 1 min", d, 1, forever, minute)
		var waits []func() bool
		if strings.HasSuffix(kind, "fair") {
			waits = append(waits, r.queued(1))
		}
		if _, ours := r.side.(goSide); ours && kind == "read" {
			waits = append(waits, r.waitingWriter)
		}
		two := r.waitsStep("2 waits", other, 2, forever, minute, waits...)
		r.passesStep("1 unlocks, 2 gets it", d, 1, two)
		r.givesStep("2 unlocks", other, 2)
		r.step("3 locks for a moment, which passes", func() string { return r.takes(d, 3, forever, moment) }, r.gone(traceName))
		r.givesStep("3 unlocks what is over", d, 3)
	}}
}

// readers records readers and a writer who waits for them.
var readers = scenario{title: "threads", run: func(r *recorder) {
	read, write := r.side.lock("read", traceName), r.side.lock("write", traceName)
	r.givesStep("1 gives back what nobody has", read, 1)
	r.takesStep("1 reads", read, 1, forever, 0)
	r.takesStep("2 reads for 10 min", read, 2, forever, tenMinutes)
	r.takesStep("1 reads again, for 1 min", read, 1, forever, minute)
	r.takesStep("1 tries to write", write, 1, 0, 0)
	r.takesStep("3 tries to write", write, 3, 0, 0)
	r.givesStep("3 gives back what it has not", read, 3)
	r.givesStep("2 gives back", read, 2)
	r.givesStep("1 gives back one of two", read, 1)
	var waits []func() bool
	if _, ours := r.side.(goSide); ours {
		waits = append(waits, r.waitingWriter)
	}
	three := r.waitsStep("3 waits to write", write, 3, forever, 0, waits...)
	r.passesStep("1 gives back, 3 writes", read, 1, three)
	r.givesStep("3 gives back", write, 3)
	r.takesStep("1 reads for 1 min", read, 1, forever, minute)
	r.forceStep("unlock of the writer by force", write)
	r.forceStep("unlock of readers by force", read)
	r.step("4 reads for a moment, which passes", func() string { return r.takes(read, 4, forever, moment) }, r.gone(traceName))
	r.givesStep("4 gives back what is over", read, 4)
}}

// writers records what a writer does that reads as well.
var writers = scenario{title: "a writer that reads", run: func(r *recorder) {
	read, write := r.side.lock("read", traceName), r.side.lock("write", traceName)
	r.takesStep("1 writes for 10 min", write, 1, forever, tenMinutes)
	r.takesStep("1 reads for 1 min", read, 1, forever, minute)
	r.takesStep("1 reads once more, for 1 min", read, 1, forever, minute)
	r.takesStep("2 tries to read", read, 2, 0, 0)
	r.givesStep("1 gives one of two read holds back", read, 1)
	r.givesStep("1 gives the write hold back and goes on reading", write, 1)
	r.givesStep("1 gives the last back", read, 1)
}}

// does makes a call of either language. Java's null stands for null, and so does
// our lock.ErrNotAcquired.
func (r *recorder) does(what, kind, method string, args []any, null string, ours func(ctx context.Context) (any, error), settled ...func() bool) {
	r.t.Helper()
	r.step(what, func() string {
		if j, is := r.side.(javaSide); is {
			a, err := j.c.on(r.t, kind, traceName, method, args...).within(r.t, answers)
			if err != nil {
				return "error"
			}
			var value any
			require.NoError(r.t, json.Unmarshal(a.Value, &value))
			if list, is := value.([]any); is && len(list) == 0 {
				value = nil
			}
			if value == nil {
				return null
			}
			return r.text(fmt.Sprint(value))
		}
		value, err := ours(r.t.Context())
		if errors.Is(err, lock.ErrNotAcquired) {
			return null
		}
		if err != nil {
			return "error"
		}
		if value == nil {
			return "done"
		}
		return r.text(fmt.Sprint(value))
	}, settled...)
}

// by does something to the servers that is of neither side.
func (r *recorder) by(words ...string) {
	r.t.Helper()
	require.NoError(r.t, do(r.t, r.conn, words...).Error())
}

func args(a ...any) []any { return a }

// none is for calls that return nothing.
func none(err error) (any, error) { return nil, err }

var counting = scenario{title: "permits", run: func(r *recorder) {
	does := func(what, method string, a []any, ours func(ctx context.Context, s *semaphore.Semaphore) (any, error), settled ...func() bool) {
		r.t.Helper()
		r.does(what, "semaphore", method, a, "done", func(ctx context.Context) (any, error) {
			return ours(ctx, r.side.(goSide).c.Semaphore(traceName))
		}, settled...)
	}
	try := func(what string, n int) {
		r.t.Helper()
		does(what, "tryAcquireAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) {
			err := s.TryAcquire(ctx, n)
			if errors.Is(err, lock.ErrNotAcquired) {
				return false, nil
			}
			return true, err
		})
	}
	set := func(what string, n int) {
		r.t.Helper()
		does(what, "trySetPermitsAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return s.TrySetPermits(ctx, n) })
	}
	release := func(what string, n int) {
		r.t.Helper()
		does(what, "releaseAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return none(s.Release(ctx, n)) })
	}
	add := func(what string, n int) {
		r.t.Helper()
		does(what, "addPermitsAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return none(s.AddPermits(ctx, n)) })
	}
	drain := func(what string) {
		r.t.Helper()
		does(what, "drainPermitsAsync", nil, func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return s.Drain(ctx) })
	}
	available := func(what string) {
		r.t.Helper()
		does(what, "availablePermitsAsync", nil, func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return s.Available(ctx) })
	}
	try("a permit of none", 1)
	set("5 are set", 5)
	set("7 are set again", 7)
	try("3 are taken", 3)
	try("3 are not to be had", 3)
	var enters func() bool // once
	r.step("somebody waits for 3", func() string {
		if j, is := r.side.(javaSide); is {
			c := j.c.on(r.t, "semaphore", traceName, "acquireAsync", 3)
			enters = func() bool { c.must(r.t, nil); return true }
			return "waits"
		}
		e := begun(r.t, context.Background(), func(ctx context.Context) error {
			return r.side.(goSide).c.Semaphore(traceName).Acquire(ctx, 3)
		})
		enters = func() bool { e.gets(r.t, answers); return true }
		return "waits"
	}, r.parked, func() bool {
		_, java := r.side.(javaSide)
		return java || !r.gone("redlatch_sc_alive:{"+traceName+"}")()
	})
	does("1 is released, who waits gets 3", "releaseAsync", args(1), func(ctx context.Context, s *semaphore.Semaphore) (any, error) {
		return none(s.Release(ctx, 1))
	}, sync.OnceValue(func() bool { return enters() }))
	release("2 are released", 2)
	available("how many there are")
	add("2 are added", 2)
	drain("all are taken")
	release("1 is released", 1)
	r.by("PEXPIRE", traceName, "60000")
	try("1 is taken of what expires", 1)
	release("2 are released of what expires", 2)
	add("1 is added to what expires", 1)
	r.by("PEXPIRE", traceName, "60000")
	drain("all are taken of what expires")
	add("2 are taken away", -2)
	release("1 is released and none is free", 1)
	drain("a negative number is taken")
	r.by("DEL", traceName)
	release("1 is released that nobody has set", 1)
}}

var expiring = scenario{title: "permits", run: func(r *recorder) {
	var ids []string // that were acquired, in this order
	does := func(what, method string, a []any, null string, ours func(ctx context.Context, e *semaphore.Expirable) (any, error), settled ...func() bool) {
		r.t.Helper()
		r.does(what, "permits", method, a, null, func(ctx context.Context) (any, error) {
			return ours(ctx, r.side.(goSide).c.PermitSemaphore(traceName))
		}, settled...)
	}
	// acquire takes permits; 0 is a lease that is renewed where there is such a thing,
	// -1 one that has no end.
	acquire := func(what string, n int, lease time.Duration, settled ...func() bool) {
		r.t.Helper()
		r.step(what, func() string {
			var got []string
			if j, is := r.side.(javaSide); is {
				leaseMS := max(lease.Milliseconds(), 0)
				if lease <= 0 {
					leaseMS = -1
				}
				var value []string
				if n > 1 {
					j.c.on(r.t, "permits", traceName, "tryAcquireAsync", n, 0, leaseMS, ms).must(r.t, &value)
				} else {
					var id *string
					j.c.on(r.t, "permits", traceName, "tryAcquireAsync", 0, leaseMS, ms).must(r.t, &id)
					if id != nil {
						value = append(value, *id)
					}
				}
				got = value
			} else {
				var opts []lock.Option
				if lease == -1 {
					opts = append(opts, semaphore.Forever)
				} else if lease != 0 {
					opts = append(opts, lock.Lease(lease))
				}
				permits, err := r.side.(goSide).c.PermitSemaphore(traceName).TryAcquireN(r.t.Context(), n, opts...)
				if !errors.Is(err, lock.ErrNotAcquired) {
					require.NoError(r.t, err)
				}
				for _, p := range permits {
					got = append(got, p.ID())
				}
				// Nobody gives back what is let go of.
				r.t.Cleanup(func() { _ = permits })
			}
			if len(got) == 0 {
				return "refused"
			}
			ids = append(ids, got...)
			return r.text(fmt.Sprint(got))
		}, settled...)
	}
	release := func(what string, of ...string) {
		r.t.Helper()
		if len(of) == 1 {
			does(what, "tryReleaseAsync", args(of[0]), "done", func(ctx context.Context, e *semaphore.Expirable) (any, error) { return e.TryRelease(ctx, of...) })
			return
		}
		r.step(what, func() string {
			if j, is := r.side.(javaSide); is {
				var n int
				j.c.on(r.t, "permits", traceName, "tryReleaseAsync", of).must(r.t, &n)
				return fmt.Sprint(n == len(of))
			}
			ok, err := r.side.(goSide).c.PermitSemaphore(traceName).TryRelease(r.t.Context(), of...)
			require.NoError(r.t, err)
			return fmt.Sprint(ok)
		})
	}
	lease := func(what, id string) {
		r.t.Helper()
		does(what, "updateLeaseTimeAsync", args(id, tenMinutes.Milliseconds(), ms), "done", func(ctx context.Context, e *semaphore.Expirable) (any, error) {
			return e.UpdateLeaseTime(ctx, id, tenMinutes)
		})
	}
	set := func(what string, n int) {
		r.t.Helper()
		does(what, "setPermitsAsync", args(n), "done", func(ctx context.Context, e *semaphore.Expirable) (any, error) { return none(e.SetPermits(ctx, n)) })
	}
	trySet := func(what string, n int) {
		r.t.Helper()
		does(what, "trySetPermitsAsync", args(n), "done", func(ctx context.Context, e *semaphore.Expirable) (any, error) { return e.TrySetPermits(ctx, n) })
	}
	add := func(what string, n int) {
		r.t.Helper()
		does(what, "addPermitsAsync", args(n), "done", func(ctx context.Context, e *semaphore.Expirable) (any, error) { return none(e.AddPermits(ctx, n)) })
	}
	count := func(what, method string, ours func(e *semaphore.Expirable, ctx context.Context) (int, error)) {
		r.t.Helper()
		does(what, method, nil, "done", func(ctx context.Context, e *semaphore.Expirable) (any, error) { return ours(e, ctx) })
	}
	// over is that the first of the permits that expire has expired.
	over := func() bool {
		scores, err := do(r.t, r.conn, "ZRANGE", "{"+traceName+"}:timeout", "0", "0", "WITHSCORES").AsZScores()
		return err == nil && len(scores) == 1 && int64(scores[0].Score) < time.Now().UnixMilli()
	}
	acquire("a permit of none", 1, minute)
	trySet("5 are set", 5)
	trySet("7 are set again", 7)
	acquire("1 is taken for 1 min", 1, minute)
	acquire("1 is taken for ever", 1, -1)
	acquire("2 are taken for 1 min", 2, minute)
	acquire("1 is taken without a lease", 1, 0)
	acquire("no more are to be had", 1, minute)
	lease("one is to last for 10 min", ids[0])
	count("how many are free", "availablePermitsAsync", (*semaphore.Expirable).Available)
	count("how many are taken", "acquiredPermitsAsync", (*semaphore.Expirable).Acquired)
	count("how many there are", "getPermitsAsync", (*semaphore.Expirable).Permits)
	release("1 is released", ids[0])
	release("1 is released again", ids[0])
	release("2 are released, one of which is not taken", ids[0], ids[1])
	release("2 are released", ids[2], ids[3])
	set("there are to be 7", 7)
	set("there are to be 7 already", 7)
	add("2 are added", 2)
	add("1 is taken away", -1)
	acquire("1 is taken for a moment, which passes", 1, moment, over)
	acquire("1 is taken where one is over", 1, minute)
	acquire("1 is taken for a moment, which passes too", 1, moment, over)
	count("how many are free where one is over", "availablePermitsAsync", (*semaphore.Expirable).Available)
	acquire("1 is taken where one was over", 1, minute)
	acquire("1 is taken for a moment, to be released", 1, moment, over)
	release("what is over is released", ids[len(ids)-1])
	acquire("another 1 is taken where one was over", 1, minute)
	acquire("1 is taken for a moment, to last longer", 1, moment, over)
	lease("what is over is to last", ids[len(ids)-1])
	acquire("the last 1 is taken where one was over", 1, minute)
	r.by("PEXPIRE", traceName, "60000")
	acquire("1 is taken for 10 min of what expires", 1, tenMinutes)
	set("there are to be 3 of what expires", 3)
	r.by("DEL", traceName)
	r.by("DEL", "{"+traceName+"}:timeout")
	trySet("3 are set", 3)
	r.by("PEXPIRE", traceName, "60000")
	acquire("the first is taken for 10 min of what expires", 1, tenMinutes)
}}

var gate = scenario{title: "rounds", run: func(r *recorder) {
	set := func(what string, n int) {
		r.t.Helper()
		r.does(what, "latch", "trySetCountAsync", args(n), "done", func(ctx context.Context) (any, error) {
			return r.side.(goSide).c.CountDownLatch(traceName).TrySetCount(ctx, n)
		})
	}
	down := func(what string) {
		r.t.Helper()
		r.does(what, "latch", "countDownAsync", nil, "done", func(ctx context.Context) (any, error) {
			_, err := r.side.(goSide).c.CountDownLatch(traceName).CountDown(ctx)
			return none(err)
		})
	}
	remove := func(what string) {
		r.t.Helper()
		r.does(what, "latch", "deleteAsync", nil, "done", func(ctx context.Context) (any, error) {
			return r.side.(goSide).c.CountDownLatch(traceName).Delete(ctx)
		})
	}
	down("counted down where there is no count")
	set("2 are set", 2)
	set("3 are set again", 3)
	r.does("how many are left", "latch", "getCountAsync", nil, "done", func(ctx context.Context) (any, error) {
		return r.side.(goSide).c.CountDownLatch(traceName).Count(ctx)
	})
	down("counted down")
	down("counted down to zero")
	set("1 is set", 1)
	remove("deleted")
	remove("deleted again")
	r.by("SET", traceName, "0")
	set("2 are set where a zero is stored", 2)
}}

// traces are what is recorded of each kind.
var traces = []struct {
	kind      string
	scenarios []scenario
}{
	{"lock", []scenario{exclusive("lock"), anonymous("lock")}},
	{"non-reentrant", []scenario{exclusive("non-reentrant"), anonymous("non-reentrant")}},
	{"fenced", []scenario{exclusive("fenced"), anonymous("fenced")}},
	{"spin", []scenario{exclusive("spin"), anonymous("spin")}},
	{"fair", []scenario{exclusive("fair"), anonymous("fair")}},
	{"non-reentrant fair", []scenario{exclusive("non-reentrant fair"), anonymous("non-reentrant fair")}},
	{"read", []scenario{readers, anonymous("read")}},
	{"write", []scenario{exclusive("write"), writers, anonymous("write")}},
	{"semaphore", []scenario{counting}},
	{"permits", []scenario{expiring}},
	{"latch", []scenario{gate}},
}

// older is what a trace says of versions other than the newest.
var older = regexp.MustCompile(`(?m)^  Redisson .*\n(?:  [-+] .*\n)*`)

// TestTraces has each language do the same things, and compares what is on the servers
// after each, and what is published, with testdata/traces: what Redisson does, and, by
// name, all that redlatch does otherwise. A step there has its name, the reply, messages
// (channel and payload), results of unlocks that were kept for a while, and the keys: a
// line with type and time to live, rounded up to 10 s, and one for each thing in it. A
// string other than the object itself is one line.
//
// With -update the files are written anew, from redis-server.
func TestTraces(t *testing.T) {
	var occur sync.Map // the indices of differences that do
	var ran atomic.Int64
	on := func(t *testing.T, of []string, servers func(t *testing.T) []*testserver.Server) {
		for _, tr := range traces {
			t.Run(tr.kind, func(t *testing.T) {
				servers := servers(t)
				ran.Add(1)
				var text strings.Builder
				for _, sc := range tr.scenarios {
					compose(t, &text, tr.kind, sc, of, servers, &occur)
				}
				file := filepath.Join("testdata", "traces", strings.ReplaceAll(tr.kind, " ", "-")+".txt")
				if *update && len(of) == 3 {
					require.NoError(t, os.WriteFile(file, []byte(text.String()), 0o644))
				}
				want, err := os.ReadFile(file)
				require.NoError(t, err)
				if len(of) == 1 {
					want = older.ReplaceAll(want, nil)
				}
				was, is := strings.Split(string(want), "\n"), strings.Split(text.String(), "\n")
				for i := range max(len(was), len(is)) {
					if i == len(was) || i == len(is) || was[i] != is[i] {
						t.Errorf("%s is not what is recorded now, from line %d on:\n%s\nnow:\n%s",
							file, i+1, some(was[i:]), some(is[i:]))
						break
					}
				}
			})
		}
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		of := versions()
		if s.Program == testserver.Valkey {
			of = of[:1] // they differ, but not by the server
		}
		on(t, of, func(t *testing.T) []*testserver.Server {
			t.Parallel()
			return []*testserver.Server{harness.Server(t, s.Program)}
		})
	})
	if clustered() {
		t.Run("cluster", func(t *testing.T) {
			servers := cluster(t)
			on(t, []string{newest}, func(*testing.T) []*testserver.Server { return servers })
		})
	}
	if int(ran.Load()) < len(traces) {
		return // of a part nothing follows
	}
	for k, d := range differences {
		_, is := occur.Load(k)
		assert.True(t, is, "%s does not occur: nothing matches %s", d.name, d.where)
	}
}

// some returns the first lines.
func some(lines []string) string { return strings.Join(lines[:min(len(lines), 8)], "\n") }

// compose records a scenario on all sides and writes what Redisson does, and where
// others differ.
func compose(t *testing.T, text *strings.Builder, kind string, sc scenario, versions []string, servers []*testserver.Server, occur *sync.Map) {
	t.Helper()
	var base []traced
	type variant struct {
		name  string
		ours  bool
		steps []traced
	}
	var others []variant
	for _, version := range versions {
		if !has(version, kind) {
			continue
		}
		p := at(t, version, servers...)
		// In a test of its own, which ends with its client.
		var steps []traced
		t.Run(sc.title+", Redisson "+version, func(t *testing.T) { steps = record(t, p, javaSide{p.theirs(t)}, sc) })
		if version == newest {
			base = steps
		} else {
			others = append(others, variant{"Redisson " + version, false, steps})
		}
	}
	p := at(t, newest, servers...)
	t.Run(sc.title+", redlatch", func(t *testing.T) {
		others = append(others, variant{"redlatch", true, record(t, p, goSide{p.ours(t), !sc.fresh}, sc)})
	})
	for _, o := range others {
		require.Len(t, o.steps, len(base), "what %s does is not recorded", o.name)
	}
	require.NotEmpty(t, base)

	fmt.Fprintf(text, "# %s: %s\n", kind, sc.title)
	for i, step := range base {
		fmt.Fprintf(text, "\n%s\n", step.what)
		for _, line := range step.lines {
			fmt.Fprintf(text, "    %s\n", line)
		}
		for _, o := range others {
			require.Equal(t, step.what, o.steps[i].what)
			lines := compare(step.lines, o.steps[i].lines)
			if len(lines) > 0 {
				fmt.Fprintf(text, "  %s\n", o.name)
			}
			for _, line := range lines {
				if !o.ours {
					fmt.Fprintf(text, "  %s\n", line)
					continue
				}
				where := kind + ", " + sc.title + ": " + step.what + ": " + line
				k := slices.IndexFunc(differences, func(d difference) bool { return d.where.MatchString(where) })
				if k < 0 {
					t.Errorf("no difference explains %q", where)
					fmt.Fprintf(text, "  %s [?]\n", line)
					continue
				}
				occur.Store(k, true)
				fmt.Fprintf(text, "  %s [%s]\n", line, differences[k].name)
			}
		}
	}
	text.WriteString("\n")
}

// compare returns the lines that only one of two has, the first's with a minus.
func compare(a, b []string) []string {
	var lines []string
	rest := slices.Clone(b)
	for _, line := range a {
		if i := slices.Index(rest, line); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			lines = append(lines, "- "+line)
		}
	}
	for _, line := range rest {
		lines = append(lines, "+ "+line)
	}
	return lines
}

var explained = regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|")

// TestDifferencesAreDocumented holds the names of differences against the table of
// docs/compatibility.md: each has a row there, and each row is of one.
func TestDifferencesAreDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "docs", "compatibility.md"))
	require.NoError(t, err)
	var there, here []string
	for _, m := range explained.FindAllSubmatch(text, -1) {
		there = append(there, string(m[1]))
	}
	for _, d := range differences {
		if !slices.Contains(here, d.name) {
			here = append(here, d.name)
		}
	}
	assert.ElementsMatch(t, here, there)
}

// The versions that are tested are those that are said to be.
func TestVersionsAreDocumented(t *testing.T) {
	for _, file := range []string{"README.md", filepath.Join("docs", "compatibility.md")} {
		text, err := os.ReadFile(filepath.Join("..", file))
		require.NoError(t, err)
		for _, folder := range versions() {
			var version string
			shared(t, folder).give(t, command{"do": "version"}).must(t, &version)
			require.Contains(t, string(text), version, file)
		}
	}
}

// TestJavaEndsHoldsItself shows what docs/compatibility.md says of holds that Java ends or
// cuts short by itself.
func TestJavaEndsHoldsItself(t *testing.T) {
	harness.Full(t)
	const watchdog = 1500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, version := range versions() {
			t.Run("Redisson "+version, func(t *testing.T) {
				p := at(t, version, s)
				t.Parallel()
				name := "ended in " + version
				java := javaSide{p.theirs(t, fmt.Sprintf("lockWatchdogTimeout: %d", watchdog.Milliseconds()))}

				// A multi lock with a lease gives the fencing counter that lease.
				multi := command{"client": java.c.name, "kind": "multi", "members": []any{java.c.object("fenced", "fenced "+name)}}
				var got bool
				java.c.of(t, multi, "tryLockAsync", 0, time.Minute.Milliseconds(), ms, 1).must(t, &got)
				require.True(t, got)
				require.Positive(t, harness.PTTL(t, s.Addr, "redisson_lock_token:{fenced "+name+"}"))

				// A writer that gives a read hold back is renewed no more.
				write, read := java.lock("write", name), java.lock("read", name)
				write.take(t, 1, forever, 0).gets(t, answers)
				read.take(t, 1, forever, 0).gets(t, answers)
				require.NoError(t, read.release(t, 1))
				ours := goSide{p.ours(t), false}.lock("read", name)
				ours.take(t, 1, 0, 0).fails(t, answers)
				if version != latchless {
					ours.take(t, 1, 2*watchdog, 0).gets(t, answers)
					require.ErrorIs(t, write.release(t, 1), lock.ErrNotHeld)
					require.NoError(t, ours.release(t, 1))
					return
				}
				ours.take(t, 1, 2*watchdog, 0).fails(t, answers) // that version goes on
				require.NoError(t, write.release(t, 1))
			})
		}
	})
}

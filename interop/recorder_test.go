package interop

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// traced is the result of a step of a scenario.
type traced struct {
	what  string
	lines []string
}

// recorder records the effects of a side on the servers, step by step.
type recorder struct {
	t        *testing.T
	p        *env
	side     side
	conn     rueidis.Client
	monitors []*monitor
	views    []*goView         // of the Go side
	waiters  map[string]uint64 // the threads of waiting claims in Go, by their ids
	waiting  uint64            // the thread that begins to wait in the current step, or 0
	// loose is set after a waiter has left a redlatch queue: the others notice it with their
	// next heartbeat, and only then do their deadlines shrink.
	loose bool
	steps []traced
}

// scenario is the object to record.
type scenario struct {
	title string
	fresh bool // if no owner is named in Go
	run   func(r *recorder)
}

// record runs a scenario on empty servers.
func record(t *testing.T, p *env, s side, sc scenario) []traced {
	t.Helper()
	r := &recorder{t: t, p: p, side: s, conn: p.conn(t), waiters: map[string]uint64{}}
	for _, server := range p.servers {
		harness.Do(t, server.Addr, "FLUSHALL")
		r.monitors = append(r.monitors, newMonitor(t, server.Addr, func(monitored) bool { return true }))
	}
	sc.run(r)
	require.Empty(t, r.sideEffects(), "after the last step")
	return r.steps
}

// step performs an action of the side. It records the reply, the messages, the kept results,
// and the keys once all conditions in until hold.
func (r *recorder) step(what string, act func() string, until ...func() bool) {
	r.t.Helper()
	lines := []string{"-> " + act()}
	harness.Eventually(r.t, answers, what+" is complete", func() bool {
		for _, s := range until {
			if !s() {
				return false
			}
		}
		// The kept result of an unlock is deleted after its reply. Redisson 3.52 deletes a
		// wrong key instead.
		for _, key := range r.keys() {
			if r.ended(key) && !r.leaves() {
				return false
			}
		}
		return true
	})
	lines = append(lines, r.sideEffects()...)
	r.steps = append(r.steps, traced{what, append(lines, r.state()...)})
}

// sideEffects returns the messages and kept results since its last call.
func (r *recorder) sideEffects() (lines []string) {
	r.t.Helper()
	for _, m := range r.monitors {
		for _, c := range m.since(r.t) {
			switch name := strings.ToUpper(c.words[0]); {
			case name == "PUBLISH" || name == "SPUBLISH":
				require.Equal(r.t, r.p.cluster, name == "SPUBLISH", "%s", c.words)
				lines = append(lines, "publishes "+r.text(c.words[1])+" "+c.words[2])
			case name == "SET" && r.ended(c.words[1]):
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

// ended reports whether a key keeps the result of an unlock.
func (*recorder) ended(key string) bool { return strings.HasPrefix(key, "redisson_unlock_latch:") }

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

// queueKeys are the keys of a fair lock: the queue, the deadlines, the heartbeats, the order.
var queueKeys = []string{
	"redisson_lock_queue:{" + traceName + "}", "redisson_lock_timeout:{" + traceName + "}", "redlatch_lock_alive:{" + traceName + "}",
	"redlatch_lock_order:{" + traceName + "}",
}

// state describes all keys and their contents.
func (r *recorder) state() []string {
	var blocks [][]string
	list := func(command, key string, args ...string) []string {
		values, err := do(r.t, r.conn, append([]string{command, key}, args...)...).AsStrSlice()
		require.NoError(r.t, err)
		return values
	}
	for _, key := range r.keys() {
		if r.ended(key) {
			continue // already recorded with its step
		}
		kind, err := do(r.t, r.conn, "TYPE", key).ToString()
		require.NoError(r.t, err)
		ttl, err := do(r.t, r.conn, "PTTL", key).AsInt64()
		require.NoError(r.t, err)
		name := r.text(key)
		var lines []string
		add := func(format string, args ...any) { lines = append(lines, name+": "+fmt.Sprintf(format, args...)) }
		requests := strings.HasPrefix(key, "redlatch_sc_request")
		expiry := "stays"
		if ttl != -1 {
			expiry = tens(ttl)
		}
		if ttl != -1 && (slices.Contains(queueKeys, key) || requests && kind == "hash") {
			expiry = "expires" // each heartbeat rewrites the time, and some requests do
		}
		if !requests && (kind != "string" || key == traceName) {
			add("%s, %s", kind, expiry)
		}
		switch kind {
		case "string":
			value, err := do(r.t, r.conn, "GET", key).ToString()
			require.NoError(r.t, err)
			switch {
			case strings.HasPrefix(key, "redlatch_latch_round:"):
				value = "<round>"
			case requests:
				value = "<time>"
			case strings.HasPrefix(key, "redlatch_rl_turn:"):
				value = "<time>" + value[strings.IndexByte(value, ' '):]
			}
			if key == traceName {
				add("%s", r.text(value))
			} else {
				add("%s, %s", r.text(value), expiry)
			}
		case "hash":
			if requests {
				add("<numbers and replies>, %s", expiry)
				break
			}
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
			now := time.Now().UnixMilli() // the servers run here, and a heartbeat may have come just before
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
			require.Fail(r.t, "unknown type "+kind)
		}
		slices.Sort(lines[1:])
		blocks = append(blocks, lines)
	}
	// Random parts of the keys must not determine the order.
	slices.SortFunc(blocks, slices.Compare)
	return slices.Concat(blocks...)
}

// tens rounds up to tens of seconds, so that values set within the last ten seconds are equal.
func tens(ms int64) string {
	return fmt.Sprintf("%ds", (ms+9_950)/10_000*10)
}

var (
	randomID    = regexp.MustCompile(`[0-9a-f]{32}`)
	ownerNumber = regexp.MustCompile(`<client>:\d+`)
)

// text removes the varying parts of a key or value.
func (r *recorder) text(s string) string {
	s = randomID.ReplaceAllString(strings.ReplaceAll(s, r.side.id(), "<client>"), "<id>")
	if _, ours := r.side.(goSide); ours {
		s = ownerNumber.ReplaceAllStringFunc(s, r.thread)
	}
	if len(s) == 16 && strings.ContainsFunc(s, func(c rune) bool { return c > '~' || c < ' ' }) {
		s = "<16 bytes>"
	} else if len(s) == 21 && s[0] == 16 {
		s = fmt.Sprintf("<%d permits>", binary.LittleEndian.Uint32([]byte(s[17:])))
	}
	return s
}

// lock returns the recorded lock.
func (r *recorder) lock(kind string) view {
	d := r.side.lock(kind, traceName)
	if ours, is := d.(*goView); is {
		r.views = append(r.views, ours)
	}
	return d
}

// thread replaces the number of a claim in Go with the thread that holds it or waits for it. A
// new claim that nobody holds belongs to the thread that begins to wait in the current step.
func (r *recorder) thread(claim string) string {
	id := strings.Replace(claim, "<client>", r.side.id(), 1)
	for _, d := range r.views {
		if thread, is := d.holder(id); is {
			return fmt.Sprint("<client>:", thread)
		}
	}
	if r.waiters[id] == 0 {
		r.waiters[id] = r.waiting
	}
	return fmt.Sprint("<client>:", r.waiters[id])
}

// gone, waitingWriter and queued are conditions of steps: a key is gone, a redlatch writer
// blocks new readers, n waiters queue for a fair lock.
func (r *recorder) gone(key string) func() bool {
	return func() bool {
		n, err := do(r.t, r.conn, "EXISTS", key).AsInt64()
		return err == nil && n == 0
	}
}

// parked reports whether waiters exist and none has an attempt to make, not even after the
// confirmation of its subscription. It is unknown for Java.
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
	channels := g.c.Stats().PubSub
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

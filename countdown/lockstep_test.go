package countdown_test

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

//go:embed testdata/java.lua
var javaLua string

var javaScript = wire.NewScript(javaLua)

// The scripts do what the model does, in any order of steps.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(60_000), Length: 60, Kinds: stepKinds,
			Outcomes: []string{
				"set 1 on", "set 1 on 0", "set 0 on more", "set for 1 on", "set for 1 on 0", "set for 0 on more",
				"down to 0 of", "down to 0 of 0", "down to 0 of more", "down to 1 of more",
				"deleted 0", "deleted 1", "expired true", "expired false",
				"repeated -1", "repeated 0", "repeated 1", "cancelled -1", "cancelled 0", "cancelled 1",
				"read 0 false false", "read 0 false true", "read 1 true false", "read 1 true true", "read 1 false false",
				"java set 0", "java set 1", "java down -1", "java down 0", "java down 1", "java delete 0", "java delete 1", "java reset 1",
			},
			Start: func(worker int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, worker)
				return func(_ uint64, seen lockstep.Seen) lockstep.Walk[step] {
					x := &walk{conn: conn, w: &world{now: 1_700_000_000_000, replies: map[string]cachedReply{}}, seen: seen}
					conn.Reset(x.w.now)
					return x
				}
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps.
var stepKinds = lockstep.Weights{
	{"set", 12}, {"set for", 8}, {"down", 25}, {"delete", 5}, {"read", 12},
	{"redeliver", 5}, {"cancel", 5}, // the last request, or the next
	{"expire", 7}, {"advance the clock", 10},
	{"java set", 8}, {"java down", 7}, {"java delete", 2}, {"java reset", 3},
}

// world is the model of one latch: the expected state and replies of the server. Times
// are in ms.
type world struct {
	now         int64
	value       string // the count as it is stored, "" if there is none
	expiry      int64  // expiry of the count, 0 if never
	round       string
	roundExpiry int64 // expiry of the round id
	replies     map[string]cachedReply
	messages    []string
}

// cachedReply is the reply of a request, -1 if it was cancelled.
type cachedReply struct{ reply, expiry int64 }

// once returns the reply of a request, which run runs at most once. A request without an
// effect may run again.
func (w *world) once(id string, run func() (reply int64, effect bool)) int64 {
	if cached, ok := w.replies[id]; ok {
		return cached.reply
	}
	reply, effect := run()
	if effect {
		w.replies[id] = cachedReply{reply, w.now + countdown.ReplyTTL.Milliseconds()}
	}
	return reply
}

func (w *world) cancel(id string) int64 {
	if cached, ok := w.replies[id]; ok {
		return cached.reply
	}
	w.replies[id] = cachedReply{-1, w.now + time.Hour.Milliseconds()}
	return -1
}

func (w *world) count() int64 {
	n, _ := strconv.ParseInt(w.value, 10, 64)
	return max(n, 0)
}

func (w *world) publish(message string) {
	w.messages = append(w.messages, wire.LatchChannel(key)+" "+message)
}

func (w *world) finish() { w.value, w.expiry, w.round, w.roundExpiry = "", 0, "", 0 }

// set sets a count that expires after ttl, never if that is 0.
func (w *world) set(n, ttl int64, id string) (int64, bool) {
	if w.count() > 0 {
		return 0, false
	}
	w.value, w.expiry = itoa(n), 0
	if ttl > 0 {
		w.expiry = w.now + ttl
	}
	w.round, w.roundExpiry = id, w.now+countdown.RoundTTL.Milliseconds()
	w.publish("1")
	return 1, true
}

func (w *world) down(n int64) (int64, bool) {
	if left := w.count() - n; left > 0 {
		w.value = itoa(left)
		return left, true
	}
	if w.value == "" {
		return 0, false
	}
	w.finish()
	w.publish("0")
	return 0, true
}

func (w *world) delete() (int64, bool) {
	if w.value == "" {
		return 0, false
	}
	w.finish()
	w.publish("1")
	return 1, true
}

func (w *world) advance(ms int64) {
	w.now += ms
	if w.expiry != 0 && w.expiry < w.now {
		w.value, w.expiry = "", 0
	}
	if w.roundExpiry != 0 && w.roundExpiry < w.now {
		w.round, w.roundExpiry = "", 0
	}
	maps.DeleteFunc(w.replies, func(_ string, r cachedReply) bool { return r.expiry < w.now })
}

// java is what Redisson does.
func (w *world) java(do string, n int64) int64 {
	switch do {
	case "down":
		left, _ := strconv.ParseInt(w.value, 10, 64)
		left--
		w.value = itoa(left)
		if left <= 0 {
			w.value, w.expiry = "", 0
		}
		if left == 0 {
			w.publish("0")
		}
		return left
	case "delete":
		if w.value == "" {
			return 0
		}
		w.value, w.expiry = "", 0
	case "reset":
		for w.value != "" {
			w.java("down", 0)
		}
		return w.java("set", n)
	default:
		if w.value != "" {
			return 0
		}
		w.value = itoa(n)
	}
	w.publish("1")
	return 1
}

// state is the expected content of the server, with the messages since the last call.
func (w *world) state() (s lockstep.State) {
	if w.value != "" {
		s.Put(key, "string", w.expiry, w.value)
	}
	if w.round != "" {
		s.Put(wire.LatchRound(key), "string", w.roundExpiry, w.round)
	}
	for id, r := range w.replies {
		s.Put(countdown.CachedReply(key, id), "string", r.expiry, itoa(r.reply))
	}
	s.Told, w.messages = w.messages, nil
	return s
}

// step is a step with a count or a time in seconds.
type step struct {
	lockstep.Kind
	n int64
}

// walk compares a model with the scripts.
type walk struct {
	conn   *lockstep.Client
	w      *world
	ids    int
	last   lockstep.Request
	lastID string
	seen   lockstep.Seen
}

// Draw implements lockstep.Walk.
func (x *walk) Draw(r *rand.Rand) step {
	s := step{stepKinds.Draw(r), 1 + r.Int64N(4)}
	switch {
	case s.Kind == "advance the clock" && r.IntN(5) == 0:
		s.n = int64(countdown.RoundTTL.Seconds())
	case s.Kind == "java set" || s.Kind == "java reset":
		s.n-- // Java sets counts of 0 too
	case s.Kind == "cancel":
		s.n %= 2 // the last request, or the next
	}
	return s
}

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	switch s.Kind {
	case "set", "set for", "down", "delete":
		x.request(s)
		x.last.Send()
	case "redeliver":
		if x.last == nil {
			return false
		}
		x.last.Send()
	case "cancel":
		if s.n > 0 {
			x.request(step{"down", s.n})
		} else if x.last == nil {
			return false
		}
		want := x.w.cancel(x.lastID)
		x.seen.See("cancelled", min(want, 1))
		x.exec(countdown.Scripts["cancel"], want, x.lastID).Send()
	case "read":
		x.read()
	case "expire":
		if x.w.value == "" {
			return false
		}
		x.w.expiry = x.w.now + 1000*s.n
		lockstep.Check(x.conn.Do(context.Background(), x.conn.B().Pexpire().Key(key).Milliseconds(1000*s.n).Build()).Error())
	case "advance the clock":
		had, round := x.w.value, x.w.round
		x.w.advance(1000 * s.n)
		if had != x.w.value || round != x.w.round {
			x.seen.See("expired", had != x.w.value)
		}
		x.conn.Wait(x.w.now)
	default:
		do := strings.TrimPrefix(string(s.Kind), "java ")
		want := x.w.java(do, s.n)
		x.seen.See(s.Kind, min(max(want, -1), 1))
		x.exec(javaScript, want, "", do, "PUBLISH", wire.LatchChannel(key), itoa(s.n)).Send()
	}
	x.conn.Compare(x.w.state())
	return true
}

// End implements lockstep.Walk.
func (x *walk) End() {}

// request makes the next request the last one.
func (x *walk) request(s step) {
	x.ids++
	id := fmt.Sprint("request-", x.ids)
	x.lastID, x.last = id, func() (any, any, error) {
		on := x.w.value
		if x.w.count() > 0 {
			on = "more"
		}
		if cached, ok := x.w.replies[id]; ok {
			x.seen.See("repeated", min(cached.reply, 1))
			on = "repeated"
		}
		script, ttl, channel := countdown.Scripts[string(s.Kind)], wire.Millis(countdown.ReplyTTL), wire.LatchChannel(key)
		switch s.Kind {
		case "set", "set for":
			var countTTL int64
			countArg := ""
			if s.Kind == "set for" {
				countTTL = 1000 * s.n
				countArg = itoa(countTTL)
			}
			want := x.w.once(id, func() (int64, bool) { return x.w.set(s.n, countTTL, id) })
			x.seen.See(s.Kind, want, "on", on)
			return x.exec(script, want, id, ttl, "PUBLISH", channel, "1", itoa(s.n), id, wire.Millis(countdown.RoundTTL), countArg)()
		case "down":
			want := x.w.once(id, func() (int64, bool) { return x.w.down(s.n) })
			x.seen.See("down to", min(want, 1), "of", on)
			return x.exec(script, want, id, ttl, "PUBLISH", channel, "0", itoa(s.n))()
		default:
			want := x.w.once(id, x.w.delete)
			x.seen.See("deleted", want)
			return x.exec(script, want, id, ttl, "PUBLISH", channel, "1")()
		}
	}
}

// exec returns a request that runs a script; want is the reply of the model.
func (x *walk) exec(script *wire.Script, want int64, id string, args ...string) lockstep.Request {
	return func() (any, any, error) {
		keys := []string{key, wire.LatchRound(key), countdown.CachedReply(key, id)}
		got, err := script.Exec(context.Background(), x.conn, keys, args).AsInt64()
		return got, want, err
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// read compares what a waiter reads.
func (x *walk) read() {
	count, ttl, round, err := countdown.Read(context.Background(), x.conn, key)
	lockstep.Check(err)
	x.seen.See("read", min(count, 1), round != "", ttl >= 0)
	if count != x.w.count() || count > 0 && round != x.w.round {
		lockstep.Failf("read %d in %q, want %d in %q", count, round, x.w.count(), x.w.round)
	}
	if left := x.w.expiry - x.w.now; count > 0 && ttl.Milliseconds() != max(left, -1) {
		lockstep.Failf("read a time to live of %v, want %d ms", ttl, left)
	}
}

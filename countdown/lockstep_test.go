package countdown_test

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

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
				"set 1 on", "set 1 on 0", "set 0 on more", "set 1 on more",
				"down to 0 of", "down to 0 of 0", "down to 0 of more", "down to 1 of more",
				"deleted 0", "deleted 1", "expired true", "expired false",
				"look 0 false false", "look 0 false true", "look 1 true false", "look 1 true true", "look 1 false false",
				"java set 0", "java set 1", "java down -1", "java down 0", "java down 1", "java delete 0", "java delete 1", "java reset 1",
			},
			Start: func(lane int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, lane)
				return func(_ uint64, seen lockstep.Seen) lockstep.Walk[step] {
					x := &walk{conn: conn, w: &world{now: 1_700_000_000_000}, seen: seen}
					conn.Reset(x.w.now)
					return x
				}
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps.
var stepKinds = lockstep.Weights{
	{"set", 20}, {"down", 25}, {"delete", 5}, {"look", 12},
	{"again", 5}, // the last request is delivered again
	{"expire", 7}, {"time passes", 10},
	{"java set", 8}, {"java down", 7}, {"java delete", 2}, {"java reset", 3},
}

// world is the model of one latch: what the server should have and reply. Times are in
// ms.
type world struct {
	now   int64
	text  string // the count as it is stored, "" if there is none
	until int64  // when it expires, 0 if never
	round string
	ends  int64 // when that expires
	told  []string
}

func (w *world) count() int64 {
	n, _ := strconv.ParseInt(w.text, 10, 64)
	return max(n, 0)
}

func (w *world) tell(message string) { w.told = append(w.told, wire.LatchChannel(key)+" "+message) }

func (w *world) open() { w.text, w.until, w.round, w.ends = "", 0, "", 0 }

func (w *world) set(n int64, id string) int64 {
	if w.count() > 0 {
		if w.round == id { // delivered twice
			return 1
		}
		return 0
	}
	w.text, w.until = itoa(n), 0
	w.round, w.ends = id, w.now+countdown.RoundLife.Milliseconds()
	w.tell("1")
	return 1
}

func (w *world) down(n int64) int64 {
	if left := w.count() - n; left > 0 {
		w.text = itoa(left)
		return left
	}
	if w.text != "" {
		w.open()
		w.tell("0")
	}
	return 0
}

func (w *world) delete() int64 {
	if w.text == "" {
		return 0
	}
	w.open()
	w.tell("1")
	return 1
}

func (w *world) pass(ms int64) {
	w.now += ms
	if w.until != 0 && w.until < w.now {
		w.text, w.until = "", 0
	}
	if w.ends != 0 && w.ends < w.now {
		w.round, w.ends = "", 0
	}
}

// java is what Redisson does.
func (w *world) java(do string, n int64) int64 {
	switch do {
	case "down":
		left, _ := strconv.ParseInt(w.text, 10, 64)
		left--
		w.text = itoa(left)
		if left <= 0 {
			w.text, w.until = "", 0
		}
		if left == 0 {
			w.tell("0")
		}
		return left
	case "delete":
		if w.text == "" {
			return 0
		}
		w.text, w.until = "", 0
	case "reset":
		for w.text != "" {
			w.java("down", 0)
		}
		return w.java("set", n)
	default:
		if w.text != "" {
			return 0
		}
		w.text = itoa(n)
	}
	w.tell("1")
	return 1
}

// state is everything the server should have, and the messages since the last call.
func (w *world) state() (s lockstep.State) {
	if w.text != "" {
		s.Put(key, "string", w.until, w.text)
	}
	if w.round != "" {
		s.Put(wire.LatchRound(key), "string", w.ends, w.round)
	}
	s.Told, w.told = w.told, nil
	return s
}

// step is a step, with a count or a time in seconds.
type step struct {
	lockstep.Kind
	n int64
}

// walk is a model and the scripts.
type walk struct {
	conn *lockstep.Client
	w    *world
	ids  int
	last lockstep.Request
	seen lockstep.Seen
}

// Draw implements lockstep.Walk.
func (x *walk) Draw(r *rand.Rand) step {
	s := step{stepKinds.Draw(r), 1 + r.Int64N(4)}
	switch {
	case s.Kind == "time passes" && r.IntN(5) == 0:
		s.n = int64(countdown.RoundLife.Seconds())
	case s.Kind == "java set" || s.Kind == "java reset":
		s.n-- // Java sets counts of 0 too
	}
	return s
}

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	switch s.Kind {
	case "set", "down", "delete":
		x.last = x.request(s)
		x.last.Send()
	case "again":
		if x.last == nil {
			return false
		}
		x.last.Send()
	case "look":
		x.look()
	case "expire":
		if x.w.text == "" {
			return false
		}
		x.w.until = x.w.now + 1000*s.n
		lockstep.Check(x.conn.Do(context.Background(), x.conn.B().Pexpire().Key(key).Milliseconds(1000*s.n).Build()).Error())
	case "time passes":
		had, round := x.w.text, x.w.round
		x.w.pass(1000 * s.n)
		if had != x.w.text || round != x.w.round {
			x.seen.See("expired", had != x.w.text)
		}
		x.conn.Wait(x.w.now)
	default:
		do := strings.TrimPrefix(string(s.Kind), "java ")
		want := x.w.java(do, s.n)
		x.seen.See(s.Kind, min(max(want, -1), 1))
		x.exec(javaScript, want, do, "PUBLISH", wire.LatchChannel(key), itoa(s.n)).Send()
	}
	x.conn.Compare(x.w.state())
	return true
}

// End implements lockstep.Walk.
func (x *walk) End() {}

func (x *walk) request(s step) lockstep.Request {
	x.ids++
	id := fmt.Sprint("round-", x.ids)
	return func() (any, any, error) {
		on := x.w.text
		if x.w.count() > 0 {
			on = "more"
		}
		script, channel := countdown.Scripts[string(s.Kind)], wire.LatchChannel(key)
		switch s.Kind {
		case "set":
			want := x.w.set(s.n, id)
			x.seen.See("set", want, "on", on)
			return x.exec(script, want, itoa(s.n), id, wire.Millis(countdown.RoundLife), "PUBLISH", channel, "1")()
		case "down":
			want := x.w.down(s.n)
			x.seen.See("down to", min(want, 1), "of", on)
			return x.exec(script, want, itoa(s.n), "PUBLISH", channel, "0")()
		default:
			want := x.w.delete()
			x.seen.See("deleted", want)
			return x.exec(script, want, "PUBLISH", channel, "1")()
		}
	}
}

// exec returns a request that runs a script; want is what the model says it replies.
func (x *walk) exec(script *wire.Script, want int64, args ...string) lockstep.Request {
	return func() (any, any, error) {
		real, err := script.Exec(context.Background(), x.conn, []string{key, wire.LatchRound(key)}, args).AsInt64()
		return real, want, err
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// look compares what a waiter sees.
func (x *walk) look() {
	count, ttl, round, err := countdown.Look(context.Background(), x.conn, key)
	lockstep.Check(err)
	x.seen.See("look", min(count, 1), round != "", ttl >= 0)
	if count != x.w.count() || count > 0 && round != x.w.round {
		lockstep.Failf("seen: %d in %q, and it should be %d in %q", count, round, x.w.count(), x.w.round)
	}
	if left := x.w.until - x.w.now; count > 0 && ttl.Milliseconds() != max(left, -1) {
		lockstep.Failf("seen: a time to live of %v, and it should be %d ms", ttl, left)
	}
}

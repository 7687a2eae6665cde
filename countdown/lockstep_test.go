package countdown_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// The scripts and the model take the same random steps. After each, replies and
// everything on the server are compared. The keys have the model's time: after every
// step their expiries are set to what they are in the model, so that only the duration
// of that one step is between the two. Messages are kept in a list instead of being
// published.
//
// REDLATCH_MODEL_SEED repeats a run, REDLATCH_MODEL_STEPS makes it longer.

const (
	modelSteps  = 60_000
	walkSteps   = 60
	tooSlow     = 500 * time.Millisecond
	shrinkTries = 2000
)

// world is the model of one latch: what the server has to have, and to answer. Its time
// is its own, in ms.
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

func (w *world) store(n int64) { w.text = strconv.FormatInt(n, 10) }

func (w *world) open() { w.text, w.until, w.round, w.ends = "", 0, "", 0 }

func (w *world) set(n int64, id string) int64 {
	if w.count() > 0 {
		if w.round == id { // delivered twice
			return 1
		}
		return 0
	}
	w.store(n)
	w.until = 0
	w.round, w.ends = id, w.now+countdown.RoundLife.Milliseconds()
	w.told = append(w.told, "1")
	return 1
}

func (w *world) down(n int64) int64 {
	if left := w.count() - n; left > 0 {
		w.store(left)
		return left
	}
	if w.text != "" {
		w.open()
		w.told = append(w.told, "0")
	}
	return 0
}

func (w *world) delete() int64 {
	if w.text == "" {
		return 0
	}
	w.open()
	w.told = append(w.told, "1")
	return 1
}

func (w *world) pass(ms int64) {
	w.now += ms
	if w.until != 0 && w.until <= w.now {
		w.text, w.until = "", 0
	}
	if w.ends != 0 && w.ends <= w.now {
		w.round, w.ends = "", 0
	}
}

// What Redisson does.

func (w *world) javaDown() int64 {
	n, _ := strconv.ParseInt(w.text, 10, 64)
	n--
	w.store(n)
	if n <= 0 {
		w.text, w.until = "", 0
	}
	if n == 0 {
		w.told = append(w.told, "0")
	}
	return n
}

func (w *world) javaSet(n int64) int64 {
	if w.text != "" {
		return 0
	}
	w.store(n)
	w.told = append(w.told, "1")
	return 1
}

func (w *world) javaDelete() int64 {
	if w.text == "" {
		return 0
	}
	w.text, w.until = "", 0
	w.told = append(w.told, "1")
	return 1
}

func (w *world) javaReset(n int64) int64 {
	for w.text != "" {
		w.javaDown()
	}
	return w.javaSet(n)
}

// item is a key of the server.
type item struct {
	value string
	until int64 // 0: it has no expiry
}

func (w *world) items() map[string]item {
	all := map[string]item{}
	if w.text != "" {
		all[key] = item{w.text, w.until}
	}
	if w.round != "" {
		all[wire.LatchRound(key)] = item{w.round, w.ends}
	}
	if len(w.told) > 0 {
		all[wire.LatchChannel(key)] = item{strings.Join(w.told, " "), 0}
	}
	return all
}

// op is one step.
type op struct {
	do string
	n  int64
}

func (o op) String() string { return fmt.Sprintf("%-12s %d", o.do, o.n) }

var errSlow = errors.New("the machine is too slow for this walk")

// walk is one sequence of steps.
type walk struct {
	conn rueidis.Client
	java *wire.Script
	w    *world
	ids  int
	at   int64 // the server's clock when the expiries were set last
	took int64 // how long the last step took, by that clock, in ms
	last func() error
	seen map[string]int
}

func (x *walk) see(what ...any) { x.seen[strings.TrimSpace(fmt.Sprintln(what...))]++ }

func choose(r *rand.Rand) op {
	n := int64(1 + r.IntN(4))
	switch k := r.IntN(100); {
	case k < 20:
		return op{"set", n}
	case k < 45:
		return op{"down", n}
	case k < 50:
		return op{"delete", 0}
	case k < 60:
		return op{"look", 0}
	case k < 65:
		return op{"again", 0}
	case k < 70:
		return op{"expire", 1000 * n}
	case k < 78:
		return op{"time passes", 1000 * n}
	case k < 80:
		return op{"time passes", countdown.RoundLife.Milliseconds()}
	case k < 88:
		return op{"java set", n - 1}
	case k < 95:
		return op{"java down", 0}
	case k < 97:
		return op{"java delete", 0}
	default:
		return op{"java reset", n - 1}
	}
}

func (x *walk) do(o op) error {
	switch {
	case o.do == "set":
		x.ids++
		id := fmt.Sprint("round ", x.ids)
		return x.request(func() error {
			had := x.w.text
			want := x.w.set(o.n, id)
			x.see("set", want, "on", map[bool]string{true: had, false: "more"}[had == "" || had == "0"])
			return x.reply(want, countdown.Scripts["set"], strconv.FormatInt(o.n, 10), id,
				wire.Millis(countdown.RoundLife), "RPUSH", wire.LatchChannel(key), "1")
		})
	case o.do == "down":
		return x.request(func() error {
			had := x.w.text
			want := x.w.down(o.n)
			x.see("down to", min(want, 1), "of", map[bool]string{true: had, false: "more"}[had == "" || had == "0"])
			return x.reply(want, countdown.Scripts["down"], strconv.FormatInt(o.n, 10), "RPUSH", wire.LatchChannel(key), "0")
		})
	case o.do == "delete":
		return x.request(func() error {
			want := x.w.delete()
			x.see("deleted", want)
			return x.reply(want, countdown.Scripts["delete"], "RPUSH", wire.LatchChannel(key), "1")
		})
	case o.do == "again":
		if x.last == nil {
			return nil
		}
		x.see("again")
		return x.last()
	case o.do == "look":
		return x.look()
	case o.do == "expire":
		if x.w.text != "" {
			x.see("expiry")
			x.w.until = x.w.now + o.n
		}
		_, err := x.sync(nil)
		return err
	case o.do == "time passes":
		before := x.w.items()
		x.w.pass(o.n)
		var gone []string
		for name := range before {
			if _, ok := x.w.items()[name]; !ok {
				x.see("expired", name == key)
				gone = append(gone, name)
			}
		}
		_, err := x.sync(gone)
		return err
	}
	do := strings.TrimPrefix(o.do, "java ")
	want := map[string]func() int64{
		"set": func() int64 { return x.w.javaSet(o.n) }, "down": x.w.javaDown,
		"delete": x.w.javaDelete, "reset": func() int64 { return x.w.javaReset(o.n) },
	}[do]()
	x.see(o.do, min(max(want, -1), 1))
	got, err := x.java.Exec(context.Background(), x.conn, []string{key},
		[]string{do, "RPUSH", wire.LatchChannel(key), strconv.FormatInt(o.n, 10)}).AsInt64()
	return differ(got, want, err)
}

// request sends a request, which can be delivered again.
func (x *walk) request(send func() error) error {
	x.last = send
	return send()
}

func (x *walk) reply(want int64, script *wire.Script, args ...string) error {
	got, err := script.Exec(context.Background(), x.conn, []string{key, wire.LatchRound(key)}, args).AsInt64()
	return differ(got, want, err)
}

func differ(got, want int64, err error) error {
	if err == nil && got != want {
		err = fmt.Errorf("the reply is %d, and ought to be %d", got, want)
	}
	return err
}

func (x *walk) look() error {
	count, ttl, round, err := countdown.Look(context.Background(), x.conn, key)
	if err != nil {
		return err
	}
	x.see("look", min(count, 1), round != "", ttl >= 0)
	if count != x.w.count() || count > 0 && round != x.w.round {
		return fmt.Errorf("seen: %d in %q, and it ought to be %d in %q", count, round, x.w.count(), x.w.round)
	}
	if count > 0 && (ttl >= 0) != (x.w.until != 0) {
		return fmt.Errorf("seen: a time to live of %v", ttl)
	}
	return nil
}

func (x *walk) step(o op) error {
	if err := x.do(o); err != nil {
		if _, slow := x.sync(nil); errors.Is(slow, errSlow) {
			return slow
		}
		return fmt.Errorf("%v: %w", o, err)
	}
	if err := x.compare(); err != nil {
		return fmt.Errorf("%v: %w", o, err)
	}
	x.w.told = nil
	return nil
}

// compare fails unless the server has what the model has.
func (x *walk) compare() error {
	found, err := x.sync(nil)
	if err != nil {
		return err
	}
	want := x.w.items()
	for name, i := range found {
		if _, ok := want[name]; !ok {
			return fmt.Errorf("%q = %q is there, and ought not to be", name, i.value)
		}
	}
	for name, i := range want {
		got, ok := found[name]
		if !ok {
			return fmt.Errorf("%q = %q is not there", name, i.value)
		}
		if got.value != i.value {
			return fmt.Errorf("%q is %q, and ought to be %q", name, got.value, i.value)
		}
		ttl := int64(-1)
		if i.until != 0 {
			ttl = i.until - x.w.now
		}
		if d := ttl - got.until; max(d, -d) > x.took+1 || (ttl < 0) != (got.until < 0) {
			return fmt.Errorf("%q has %d ms left, and ought to have %d (the step took %d ms)", name, got.until, ttl, x.took)
		}
	}
	return nil
}

// syncScript returns the clock and everything there is, as lists of name, value and ms
// left. Then it deletes the list of messages and the first ARGV[1] of the names that
// follow, and gives the rest the ms that follow each.
var syncScript = wire.NewScript(`
local found = {'the clock'}
for _, key in ipairs(redis.call('KEYS', '*')) do
	local value
	if redis.call('TYPE', key).ok == 'list' then
		value = table.concat(redis.call('LRANGE', key, 0, -1), ' ')
	else
		value = redis.call('GET', key)
	end
	found[#found + 1] = key
	found[#found + 1] = value
	found[#found + 1] = string.format('%d', redis.call('PTTL', key))
end
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
found[1] = string.format('%d', now)
redis.call('DEL', KEYS[1])
local gone = tonumber(ARGV[1])
for i = 2, gone + 1 do
	redis.call('DEL', ARGV[i])
end
for i = gone + 2, #ARGV, 2 do
	redis.call('PEXPIREAT', ARGV[i], string.format('%d', now + ARGV[i + 1]))
end
return found`)

// sync returns what there is, with the ms it has left as its until, and sets all
// expiries to those of the model.
func (x *walk) sync(gone []string) (map[string]item, error) {
	args := append([]string{strconv.Itoa(len(gone))}, gone...)
	for name, i := range x.w.items() {
		if i.until != 0 {
			args = append(args, name, strconv.FormatInt(i.until-x.w.now, 10))
		}
	}
	reply, err := syncScript.Exec(context.Background(), x.conn, []string{wire.LatchChannel(key)}, args).AsStrSlice()
	if err != nil {
		return nil, err
	}
	at, err := strconv.ParseInt(reply[0], 10, 64)
	if err != nil {
		return nil, err
	}
	x.took, x.at = at-x.at, at
	if x.took > tooSlow.Milliseconds() {
		return nil, errSlow
	}
	found := map[string]item{}
	for i := 1; i < len(reply); i += 3 {
		left, err := strconv.ParseInt(reply[i+2], 10, 64)
		if err != nil {
			return nil, err
		}
		found[reply[i]] = item{reply[i+1], left}
	}
	return found, nil
}

// take takes steps from an empty server until one fails, and returns those it took.
func (x *walk) take(next func(n int) (op, bool)) (ops []op, err error) {
	x.w, x.ids, x.last = &world{now: 1_000_000}, 0, nil
	if err := x.conn.Do(context.Background(), x.conn.B().Flushdb().Build()).Error(); err != nil {
		return nil, err
	}
	if _, err := x.sync(nil); err != nil && !errors.Is(err, errSlow) { // it may have counted from 1970
		return nil, err
	}
	for {
		o, ok := next(len(ops))
		if !ok {
			return ops, nil
		}
		ops = append(ops, o)
		if err := x.step(o); errors.Is(err, errSlow) {
			return ops, nil
		} else if err != nil {
			return ops, err
		}
	}
}

// shrink leaves out steps for as long as some still fail.
func (x *walk) shrink(ops []op, err error) ([]op, error) {
	tries := 0
	for size := len(ops) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(ops) && tries < shrinkTries; {
			tries++
			rest := slices.Concat(ops[:at], ops[at+size:])
			_, failure := x.take(func(n int) (op, bool) { return rest[min(n, len(rest)-1)], n < len(rest) })
			if failure != nil {
				ops, err = rest, failure
			} else {
				at += size
			}
		}
	}
	return ops, err
}

func TestScriptsKeepStepWithTheModel(t *testing.T) {
	steps, seed := modelSteps, rand.Uint64()
	if s := os.Getenv("REDLATCH_MODEL_STEPS"); s != "" {
		var err error
		steps, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_MODEL_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("REDLATCH_MODEL_SEED=%d", seed)
	java, err := os.ReadFile("testdata/java.lua")
	require.NoError(t, err)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := &walk{conn: harness.Conn(t, s.Addr), java: wire.NewScript(string(java)), seen: map[string]int{}}
		for walk := range uint64(steps / walkSteps) {
			r := rand.New(rand.NewPCG(seed, walk))
			ops, err := x.take(func(n int) (op, bool) { return choose(r), n < walkSteps })
			if err != nil {
				ops, err = x.shrink(ops, err)
				var list strings.Builder
				for _, o := range ops {
					fmt.Fprintln(&list, o)
				}
				require.FailNow(t, err.Error(), "REDLATCH_MODEL_SEED=%d, walk %d, shrunk to\n%s", seed, walk, list.String())
			}
		}
		t.Logf("seen: %v", x.seen)
		for _, what := range mustSee {
			require.True(t, steps < modelSteps || x.seen[what] > 0, "never seen: %s", what)
		}
	})
}

// mustSee is what a run is worth nothing without.
var mustSee = []string{
	"set 1 on", "set 1 on 0", "set 0 on more", "set 1 on more", "down to 0 of", "down to 0 of 0", "down to 0 of more", "down to 1 of more",
	"deleted 0", "deleted 1", "again", "expiry", "expired true", "expired false",
	"look 0 false false", "look 1 true false", "look 1 true true", "look 1 false false",
	"java set 0", "java set 1", "java down -1", "java down 0", "java down 1", "java delete 0", "java delete 1", "java reset 1",
}

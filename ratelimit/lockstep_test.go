package ratelimit_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/ratelimit"
)

// The scripts do what the model does, in any order of steps.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(60_000), Length: 60, Kinds: stepKinds,
			Outcomes: []string{
				"acquired 0", "acquired 1", "acquired all", "no limiter", "created", "too many", "blocked", "turn taken", "turn over",
				"repeated", "twice", "counted", "expired", "released 0", "released", "undone 0", "undone", "left 0", "left 1",
				"tried 0", "tried 1", "same 1", "negative", "each client",
			},
			Start: func(worker int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, worker)
				return func(_ uint64, seen lockstep.Seen) lockstep.Walk[step] {
					x := &walk{conn: conn, w: &world{now: 1_700_000_000_000, seen: seen, replies: map[string]reply{}}, seen: seen}
					conn.Reset(x.w.now)
					return x
				}
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps.
var stepKinds = lockstep.Weights{
	{"acquire", 40}, {"acquire again", 5}, {"deliver twice", 4}, {"undo", 5}, {"release", 5}, {"release again", 2}, {"leave", 4},
	{"set rate", 5}, {"try set rate", 4}, {"delete", 1}, {"available", 6}, {"advance the clock", 15}, {"lose a key", 2}, {"clock ahead", 2},
}

// limits is a configuration, with times in ms.
type limits struct{ rate, interval, own, keep int64 }

func (c limits) args() []string {
	return []string{itoa(c.rate), itoa(c.interval), itoa(c.own), itoa(c.keep)}
}

// taken is an entry.
type taken struct {
	at int64
	id string
}

func (e taken) permits() int64 { return int64(e.id[17]) } // no more than 255

// reply is the cached reply to a release.
type reply struct{ n, until int64 }

// world is the model of one limiter, as client "a" sees it. Times are in ms.
type world struct {
	now        int64
	config     *limits
	configEnds int64
	value      *int64
	valueEnds  int64
	entries    []taken // sorted
	entryEnds  int64
	holder     string // of the turn, "" if there is none
	since      int64
	turnEnds   int64
	replies    map[string]reply
	told       []string
	seen       lockstep.Seen
}

func (w *world) sum() (n int64) {
	for _, e := range w.entries {
		n += e.permits()
	}
	return n
}

func (w *world) add(e taken) (isNew bool) {
	n := len(w.entries)
	w.remove(e.id)
	isNew = n == len(w.entries)
	w.entries = append(w.entries, e)
	slices.SortFunc(w.entries, func(a, b taken) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.id, b.id)) })
	return isNew
}

func (w *world) remove(id string) (n int64) {
	w.entries = slices.DeleteFunc(w.entries, func(e taken) bool {
		if e.id == id {
			n = e.permits()
		}
		return e.id == id
	})
	if len(w.entries) == 0 {
		w.entryEnds = 0
	}
	return n
}

// dropExpired removes the entries that have expired, and returns their permits.
func (w *world) dropExpired() (n int64) {
	for len(w.entries) > 0 && w.entries[0].at <= w.now-w.config.interval {
		n += w.remove(w.entries[0].id)
	}
	return n
}

// rest is what the entries leave of the rate.
func (w *world) rest() int64 {
	w.dropExpired()
	w.seen.See("counted")
	return w.config.rate - w.sum()
}

// number is the number of free permits, of which pending have no entry yet.
func (w *world) number() int64 {
	if w.value == nil || *w.value > w.config.rate {
		return w.rest()
	}
	return *w.value
}

// due returns when n permits are free.
func (w *world) due(free *int64, n, pending int64) int64 {
	for try := 0; ; try++ {
		if *free < n {
			more := w.dropExpired()
			if more > 0 {
				w.seen.See("expired")
			}
			if *free += more; *free > w.config.rate {
				*free = w.rest() - pending
			}
		}
		if *free >= n {
			return w.now
		}
		total := *free
		for _, e := range w.entries {
			if total += e.permits(); total >= n {
				if e.at > w.now {
					for _, e := range slices.Clone(w.entries) { // they are corrected
						if e.at > w.now {
							w.add(taken{w.now, e.id})
						}
					}
				}
				return min(e.at, w.now) + w.config.interval
			}
		}
		if total+pending >= n {
			return w.now + w.config.interval
		}
		if try > 0 {
			panic("the entries have less permits than the rate")
		}
		*free = w.rest() - pending
	}
}

// store sets the number of free permits, and the lifetimes.
func (w *world) store(free int64) {
	ends := int64(0)
	if w.config.keep > 0 {
		ends = w.now + w.config.keep
	} else if w.configEnds > 0 {
		ends = w.configEnds
	}
	if w.value != nil || free != w.config.rate {
		w.value = &free
	}
	if ends == 0 {
		return
	}
	if w.value != nil {
		w.valueEnds = ends
	}
	if len(w.entries) > 0 {
		w.entryEnds = ends
	}
	if w.config.keep > 0 {
		w.configEnds = ends
	}
}

// asked is a request for permits.
type asked struct {
	n, waited int64
	entry     string
	again     bool
}

// acquire returns the number of requests served, and the free permits. The client may know the rate.
func (w *world) acquire(client string, all []asked, missing *limits, known bool) []int64 {
	if w.config == nil {
		if missing == nil {
			w.seen.See("no limiter")
			return []int64{-1}
		}
		w.seen.See("created")
		c := *missing
		w.config = &c
	}
	c := w.config
	free := w.number()
	if c.own == 1 && !known {
		free = w.rest()
	}
	blocked := func(a asked) bool {
		return c.own == 0 && w.holder != "" && w.holder != client && w.since < w.now-a.waited
	}
	served, pending, fresh := int64(0), int64(0), 0
	waits := false
	var add []taken
	wait := int64(0)
	for _, a := range all {
		known := slices.ContainsFunc(w.entries, func(e taken) bool { return e.id == a.entry })
		if known && a.again {
			w.seen.See("repeated")
		} else if a.n > c.rate {
			w.seen.See("too many")
			break
		} else if known && blocked(a) {
			w.seen.See("repeated")
		} else if blocked(a) {
			w.seen.See("blocked")
			waits = true
			break
		} else {
			due := w.due(&free, a.n, pending)
			// The request may have been one of the expired entries.
			known = slices.ContainsFunc(w.entries, func(e taken) bool { return e.id == a.entry })
			if due > w.now && !known {
				waits = true
				wait = due - w.now
				break
			}
			if due <= w.now {
				free -= a.n
				pending += a.n
				fresh++
			}
		}
		add = append(add, taken{w.now, a.entry})
		served++
	}
	for _, e := range add {
		if w.add(e) {
			fresh--
		}
	}
	if fresh > 0 {
		w.seen.See("twice")
		free = w.rest()
	}
	w.store(free)

	if waits && client != "" && c.own == 0 && !blocked(all[served]) {
		w.seen.See("turn taken")
		w.holder = client
		w.since = w.now - all[served].waited
		w.turnEnds = w.now + min(w.pause(wait, all[served:]), 5000) + ratelimit.TurnGrace.Milliseconds()
	} else if !waits && w.holder == client && client != "" && c.own == 0 {
		w.seen.See("turn over")
		w.holder = ""
	}
	if c.own == 1 {
		w.seen.See("each client")
	}
	return []int64{served, free, c.rate, c.interval}
}

// pause returns the ms after which a client tries again whose first request is due in wait ms: just then, or with the
// whole batch, or after a pause. The clock of the test is a microsecond before the next ms.
func (w *world) pause(wait int64, rest []asked) int64 {
	n := int64(0)
	for _, a := range rest {
		n += a.n
	}
	pause := min(w.config.interval*5/2, 5000)
	if all, ok := w.later(n); ok {
		pause = min(pause, (all-w.now)*1000-999)
	}
	return (max(wait*1000-999, pause) + 999) / 1000
}

// later returns when n permits will be free, if the entries have as many.
func (w *world) later(n int64) (at int64, ok bool) {
	total := w.config.rate - w.sum()
	for _, e := range w.entries {
		if total += e.permits(); total >= n {
			return min(e.at, w.now) + w.config.interval, true
		}
	}
	return 0, false
}

func (w *world) publish() { w.told = append(w.told, wire.RateChannel(key)+" 1") }

func (w *world) undo(id string) int64 {
	if w.config == nil {
		return -1
	}
	free := w.number()
	n := w.remove(id)
	if n > 0 {
		w.store(free + n)
		w.publish()
	}
	return n
}

func (w *world) release(id string, n int64) int64 {
	if r, ok := w.replies[id]; ok {
		return r.n
	}
	if w.config == nil {
		return -1
	}
	free := w.number()
	w.due(&free, w.config.rate, 0)
	left := n
	for left > 0 && len(w.entries) > 0 {
		e := w.entries[0]
		ends := w.entryEnds
		w.remove(e.id)
		if e.permits() > left {
			w.add(taken{e.at, e.id[:17] + string([]byte{byte(e.permits() - left), 0, 0, 0})})
			if len(w.entries) > 1 {
				w.entryEnds = ends // a set that was empty in between has lost its lifetime
			}
		}
		left -= min(left, e.permits())
	}
	w.store(free + n - left)
	w.replies[id] = reply{n - left, w.now + ratelimit.ReplyTTL.Milliseconds()}
	if n == left {
		w.seen.See("released 0")
		return 0
	}
	w.seen.See("released")
	w.publish()
	return n - left
}

func (w *world) setRate(c limits) {
	if w.config != nil && w.config.own != c.own {
		w.forget()
	}
	w.config = &c
	free := w.rest()
	w.value, w.valueEnds, w.configEnds, w.entryEnds = nil, 0, 0, 0
	if free != c.rate {
		w.value = &free
	}
	if free < 0 {
		w.seen.See("negative")
	}
	if c.keep > 0 {
		w.configEnds = w.now + c.keep
		if w.value != nil {
			w.valueEnds = w.configEnds
		}
		if len(w.entries) > 0 {
			w.entryEnds = w.configEnds
		}
	}
	w.publish()
}

// forget removes all but the configuration.
func (w *world) forget() {
	w.value, w.valueEnds, w.entries, w.entryEnds, w.holder = nil, 0, nil, 0, ""
}

func (w *world) trySetRate(c limits, again bool) int64 {
	if w.config != nil {
		same := int64(0)
		if again && *w.config == c {
			same = 1
		}
		if again {
			w.seen.See("same", same)
		}
		w.seen.See("tried 0")
		return same
	}
	w.seen.See("tried 1")
	w.config = &c
	if c.keep > 0 {
		w.configEnds = w.now + c.keep
	}
	w.publish()
	return 1
}

func (w *world) available() []int64 {
	if w.config == nil {
		return []int64{-1}
	}
	free := w.config.rate
	for _, e := range w.entries {
		if e.at > w.now-w.config.interval {
			free -= e.permits()
		}
	}
	if w.value != nil && *w.value+w.sum() != w.config.rate && *w.value <= w.config.rate {
		return nil // it depends on which of the two is read
	}
	return []int64{free, w.config.rate}
}

func (w *world) advance(ms int64) {
	w.now += ms
	over := func(ends int64) bool { return ends != 0 && ends < w.now }
	if over(w.configEnds) {
		w.config, w.configEnds = nil, 0
	}
	if over(w.valueEnds) {
		w.value, w.valueEnds = nil, 0
	}
	if over(w.entryEnds) {
		w.entries, w.entryEnds = nil, 0
	}
	if w.holder != "" && over(w.turnEnds) {
		w.holder = ""
	}
	for id, r := range w.replies {
		if over(r.until) {
			delete(w.replies, id)
		}
	}
}

// state is the expected content of the server, with the messages since the last call.
func (w *world) state() (s lockstep.State) {
	values, entries := wire.RateValue(key), wire.RatePermits(key)
	if w.config != nil {
		c := w.config.args()
		s.Put(key, "hash", w.configEnds, "rate", c[0], "interval", c[1], "type", c[2], "keepAliveTime", c[3])
		if w.config.own == 1 {
			values, entries = wire.RateValueOf(key, "a"), wire.RatePermitsOf(key, "a")
		}
	}
	if w.value != nil {
		s.Put(values, "string", w.valueEnds, itoa(*w.value))
	}
	var list []string
	for _, e := range w.entries {
		list = append(list, e.id, itoa(e.at))
	}
	s.Put(entries, "zset", w.entryEnds, list...)
	if w.holder != "" {
		s.Put(wire.RateTurn(key), "string", w.turnEnds, itoa(w.since)+" "+w.holder)
	}
	for id, r := range w.replies {
		s.Put(wire.RateReply(key, id), "string", r.until, itoa(r.n))
	}
	s.Told, w.told = w.told, nil
	return s
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// step is a step with the parameters of its kind.
type step struct {
	lockstep.Kind
	client string
	n      [3]int64 // permits of each request, 0 for none
	waited int64
	limits limits
	create bool
	ms     int64
}

// walk compares a model with the scripts.
type walk struct {
	conn *lockstep.Client
	w    *world
	ids  byte
	seen lockstep.Seen

	client      string
	last        []asked
	lastMissing *limits
	known       bool
	released    int64
	releaseID   string
}

// Draw implements lockstep.Walk.
func (x *walk) Draw(r *rand.Rand) step {
	s := step{Kind: stepKinds.Draw(r), client: []string{"a", "b", ""}[r.IntN(3)], waited: []int64{0, 0, 300, 2000}[r.IntN(4)]}
	s.limits = limits{rate: 1 + r.Int64N(6), interval: 1000 * (1 + r.Int64N(3))}
	if r.IntN(5) == 0 {
		s.limits.own = 1
	}
	if r.IntN(2) == 0 {
		s.limits.keep = s.limits.interval * (1 + r.Int64N(2))
	}
	s.n[0] = 1 + r.Int64N(4)
	for i := 1; i < len(s.n) && r.IntN(2) == 0; i++ {
		s.n[i] = 1 + r.Int64N(3)
	}
	s.create = r.IntN(3) == 0
	s.ms = []int64{0, 1, 300, 1000, 4000}[r.IntN(5)]
	return s
}

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	w := x.w
	if w.config != nil && w.config.own == 1 && s.client == "b" {
		s.client = "a" // whose keys these are
	}
	switch s.Kind {
	case "acquire":
		x.client, x.last, x.lastMissing, x.known = s.client, nil, nil, s.waited != 300
		for _, n := range s.n {
			if n > 0 {
				x.last = append(x.last, asked{n: n, waited: s.waited, entry: x.entry(n)})
			}
		}
		if s.create {
			x.lastMissing = &s.limits
		}
		x.acquire()
	case "acquire again", "deliver twice":
		if x.last == nil {
			return false
		}
		for i := range x.last {
			x.last[i].again = s.Kind == "acquire again"
		}
		x.acquire()
	case "undo":
		if x.last == nil {
			return false
		}
		a := x.last[0]
		had := w.undo(a.entry)
		if had == 0 {
			x.seen.See("undone 0")
		} else if had > 0 {
			x.seen.See("undone")
		}
		x.exec("undo", []int64{had}, "PUBLISH", wire.RateChannel(key), a.entry, itoa(a.n))
	case "release", "release again":
		if s.Kind == "release" {
			x.ids++
			x.releaseID, x.released = fmt.Sprint(x.ids), s.n[0]
		} else if x.releaseID == "" {
			return false
		}
		want := w.release(x.releaseID, x.released)
		x.exec("release", []int64{want}, "PUBLISH", wire.RateChannel(key), itoa(x.released), itoa(ratelimit.ReplyTTL.Milliseconds()))
	case "leave":
		want := int64(0)
		if s.client != "" && w.holder == s.client {
			want = 1
			w.holder = ""
			w.publish()
		}
		x.seen.See("left", want)
		got, err := ratelimit.Scripts["leave"].Exec(context.Background(), x.conn, []string{wire.RateTurn(key)},
			[]string{"PUBLISH", wire.RateChannel(key), cmp.Or(s.client, "nobody")}).AsInt64()
		lockstep.Check(err)
		if got != want {
			lockstep.Failf("left %d, want %d", got, want)
		}
	case "set rate":
		w.setRate(s.limits)
		x.exec("set", []int64{1}, append([]string{"PUBLISH", wire.RateChannel(key)}, s.limits.args()...)...)
	case "try set rate":
		if w.config != nil && s.create {
			s.limits = *w.config
		}
		want := w.trySetRate(s.limits, s.create)
		args := append([]string{"PUBLISH", wire.RateChannel(key)}, s.limits.args()...)
		x.exec("try set", []int64{want}, append(args, wire.Flag(s.create))...)
	case "delete":
		want := int64(0)
		if w.config != nil || w.value != nil || len(w.entries) > 0 {
			want = 1
			w.publish()
		}
		w.forget()
		w.config, w.configEnds = nil, 0
		x.exec("delete", []int64{want}, "PUBLISH", wire.RateChannel(key), "0")
	case "available":
		if want := w.available(); want != nil {
			x.exec("available", want)
		}
	case "advance the clock":
		w.advance(s.ms)
		x.conn.Wait(w.now)
	case "lose a key":
		if w.config == nil || w.config.own == 1 {
			return false
		}
		lost := wire.RateValue(key)
		w.value, w.valueEnds = nil, 0
		if s.create {
			lost = wire.RatePermits(key)
			w.entries, w.entryEnds = nil, 0
			if w.value == nil {
				lockstep.Check(x.conn.Do(context.Background(), x.conn.B().Del().Key(wire.RateValue(key)).Build()).Error())
			}
		}
		lockstep.Check(x.conn.Do(context.Background(), x.conn.B().Del().Key(lost).Build()).Error())
	case "clock ahead":
		if len(w.entries) == 0 || w.config == nil || w.config.own == 1 {
			return false
		}
		e := w.entries[0]
		ends := w.entryEnds
		w.add(taken{w.now + 60_000, e.id})
		w.entryEnds = ends
		lockstep.Check(x.conn.Do(context.Background(), x.conn.B().Arbitrary("ZADD").Keys(wire.RatePermits(key)).
			Args("XX", itoa(w.now+60_000), e.id).Build()).Error())
	}
	x.conn.Compare(w.state())
	return true
}

// End implements lockstep.Walk.
func (x *walk) End() {}

// entry returns the entry of a new request.
func (x *walk) entry(n int64) string {
	x.ids++
	return "\x10" + fmt.Sprintf("%016d", x.ids) + string([]byte{byte(n), 0, 0, 0})
}

// acquire sends the last batch.
func (x *walk) acquire() {
	args := []string{x.client, wire.Millis(ratelimit.TurnGrace), "", "", "", ""}
	if x.lastMissing != nil {
		args = append(args[:2], x.lastMissing.args()...)
	}
	args = append(args, strconv.Itoa(len(x.last)))
	for _, a := range x.last {
		args = append(args, itoa(a.n), itoa(a.waited), a.entry, wire.Flag(a.again))
	}
	want := x.w.acquire(x.client, x.last, x.lastMissing, x.known)
	known := ""
	if x.known && len(want) > 1 {
		known = itoa(want[2])
	}
	args = append(args, known)
	if len(want) > 1 {
		x.seen.See("acquired", min(want[0], 1))
		if int(want[0]) == len(x.last) {
			x.seen.See("acquired all")
		}
	}
	got := x.reply("acquire", args)
	if len(got) == 5 {
		got = slices.Delete(got, 1, 2) // the next attempt: see the turn
	}
	if !slices.Equal(got, want) {
		lockstep.Failf("the server replies %v, want %v", got, want)
	}
}

func (x *walk) exec(script string, want []int64, args ...string) {
	if got := x.reply(script, args); !slices.Equal(got, want) {
		lockstep.Failf("%s: the server replies %v, want %v", script, got, want)
	}
}

func (x *walk) reply(script string, args []string) []int64 {
	keys := []string{
		key, wire.RateValue(key), wire.RateValueOf(key, "a"), wire.RatePermits(key), wire.RatePermitsOf(key, "a"), wire.RateTurn(key),
	}
	if script == "release" {
		keys = append(keys, wire.RateReply(key, x.releaseID))
	}
	got, err := ratelimit.Scripts[script].Exec(context.Background(), x.conn, keys, args).AsIntSlice()
	lockstep.Check(err)
	return got
}

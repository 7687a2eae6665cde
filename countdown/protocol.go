package countdown

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	trySetCountScript = wire.LoadScript(luaFiles, "count", "try_set_count")
	countDownScript   = wire.LoadScript(luaFiles, "count", "count_down")
	deleteScript      = wire.LoadScript(luaFiles, "count", "delete")
	cancelScript      = wire.LoadScript(luaFiles, "cancel")
	readScript        = wire.LoadScript(luaFiles, "read")
)

const (
	// roundTTL is the time to live of a round id. A waiter compares the id with the id of its
	// previous read, which is at most a poll interval or an outage old.
	roundTTL = time.Hour
	// replyTTL is the time to live of a cached reply. Within that time a request without one
	// has had no effect.
	replyTTL = 30 * time.Second
)

// cachedReply is the key that caches the reply of a request.
func cachedReply(key, request string) string { return wire.LatchRound(key) + ":" + request }

// read returns the state of a latch.
func read(ctx context.Context, c rueidis.Client, key string) (snapshot, error) {
	reply, err := wire.List(readScript.Exec(ctx, c, []string{key, wire.LatchRound(key)}, nil), 3, 3)
	if err != nil || reply[0].IsNil() {
		return snapshot{}, err
	}

	text, textErr := wire.Text(reply[0])
	ttl, ttlErr := wire.Times.Number(reply[1])
	round := ""
	roundErr := error(nil)
	if !reply[2].IsNil() {
		round, roundErr = wire.Text(reply[2])
	}
	if err := cmp.Or(textErr, ttlErr, roundErr); err != nil {
		return snapshot{}, err
	}

	count, err := parseCount(text)
	return snapshot{count: count, ttl: wire.Duration(ttl), round: round}, err
}

// errTooLate means that the server may have dropped the cached reply.
var errTooLate = errors.New("the server answered too late")

// temporary reports whether a failed read may succeed later.
func temporary(err error) bool {
	return !wire.IsRefused(err)
}

// parseCount returns the count, 0 if it is negative. It accepts only what the server
// itself accepts as an integer.
func parseCount(text string) (int64, error) {
	count, err := strconv.ParseInt(text, 10, 64)
	if err != nil || strconv.FormatInt(count, 10) != text {
		return 0, fmt.Errorf("%w: %.40q", wire.ErrWrongType, text)
	}
	return max(count, 0), nil
}

// Shared is what the latches of one client share: their waiters, by key.
type Shared struct {
	s       *session.Session
	mu      sync.Mutex
	entries map[string]*latchIO
}

// NewShared returns what the latches of a client share. There is one for each session.
func NewShared(s *session.Session) *Shared {
	all := &Shared{s: s, entries: make(map[string]*latchIO)}
	s.List(all.holds)
	return all
}

// latchIO is the waiters of one latch with their effects. The mutex of Shared guards
// it.
type latchIO struct {
	waiters
	all   *Shared
	s     *session.Session
	key   string
	sub   *hub.Subscription
	timer watchdog.Timer
	ended []*waiter // whose end update has yet to call
}

// readTimeout bounds one read, whatever the connection does.
const readTimeout = 3 * time.Second

// join adds w to the waiters of a latch until it is released, ctx ends or the session closes,
// which waits for w.end. If the session is closed, join does nothing and returns false.
func (all *Shared) join(ctx context.Context, key string, w *waiter) bool {
	all.mu.Lock()
	defer all.mu.Unlock()

	s := all.s
	d := all.entries[key]
	if d == nil {
		d = &latchIO{all: all, s: s, key: key}
		d.waiters = waiters{fx: d, set: make(map[*waiter]struct{})}
	}
	giveUp := func() { d.update(func() { d.giveUp(w) }) } // on a goroutine of its own
	left, open := s.Join(giveUp)
	if !open {
		return false
	}

	stop := context.AfterFunc(ctx, giveUp)
	end := w.end
	w.end = func() {
		stop()
		end()
		left()
	}
	all.entries[key] = d
	d.waiters.join(w)
	return true
}

// holds yields the waiters.
func (all *Shared) holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		all.mu.Lock()
		defer all.mu.Unlock()
		for _, d := range all.entries {
			for w := range d.set {
				if !yield(session.Hold{Kind: "latch", Name: w.name, Since: w.since, Site: w.site, Waiting: true}) {
					return
				}
			}
		}
	}
}

// update runs f with the mutex held, and discards d when it has become idle. Then it ends
// the waits of waiters that have left: what that calls may take long.
func (d *latchIO) update(f func()) {
	d.all.mu.Lock()
	f()
	if d.idle() && d.all.entries[d.key] == d {
		delete(d.all.entries, d.key)
		d.s.Watchdog.Wheel().Cancel(&d.timer)
	}
	ended := d.ended
	d.ended = nil
	d.all.mu.Unlock()
	for _, w := range ended {
		w.end()
	}
}

// left implements effects.
func (d *latchIO) left(w *waiter) { d.ended = append(d.ended, w) }

// read implements effects. It is not bound to the context of any waiter.
func (d *latchIO) read() {
	d.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		s, err := read(ctx, d.s.Client, d.key)
		d.update(func() {
			if err == nil {
				d.onSnapshot(s)
			} else {
				d.onError(err, temporary(err), minRetry+rand.N(maxRetry-minRetry))
			}
		})
	})
}

// subscribe implements effects.
func (d *latchIO) subscribe() (confirmed bool) {
	d.sub, confirmed = d.s.Hub.Subscribe(wire.LatchChannel(d.key), d)
	return confirmed
}

// unsubscribe implements effects.
func (d *latchIO) unsubscribe() { d.sub.Close() }

// setTimer implements effects.
func (d *latchIO) setTimer(pause time.Duration) {
	d.s.Watchdog.Wheel().Schedule(&d.timer, time.Now().Add(pause), d)
}

// Expire is called by the wheel.
func (d *latchIO) Expire(time.Time) { d.update(d.waiters.read) }

// Notify is called by the hub for every message, and when the server has confirmed the
// subscription: messages may have been missed before.
func (d *latchIO) Notify(hub.Event) { d.update(d.waiters.read) }

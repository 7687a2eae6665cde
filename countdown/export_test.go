package countdown

import (
	"context"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
)

// Scripts are those that may write, by what they do.
var Scripts = map[string]*wire.Script{"set": trySetCountScript, "down": countDownScript, "delete": deleteScript}

// Look returns what a waiter would see.
func Look(ctx context.Context, c rueidis.Client, key string) (count int64, ttl time.Duration, round string, err error) {
	s, err := look(ctx, c, key)
	return s.count, s.ttl, s.round, err
}

// RoundLife is for how long the identity of a round is kept.
const RoundLife = roundLife

// Settled returns how many wait for the latch and have their order against the messages.
func Settled(l *Latch) int { return inStage(l, settled) }

// Fresh returns how many wait and have not seen it yet.
func Fresh(l *Latch) int { return inStage(l, fresh) + inStage(l, asked) }

func inStage(l *Latch, s stage) (n int) {
	all := session.Of[gates](l.s)
	all.mu.Lock()
	defer all.mu.Unlock()
	if d := all.open[l.key]; d != nil {
		d.each(s, func(*waiter) { n++ })
	}
	return n
}

// Gates returns how many latches of the client somebody waits for.
func Gates(l *Latch) int {
	all := session.Of[gates](l.s)
	all.mu.Lock()
	defer all.mu.Unlock()
	return len(all.open)
}

package countdown

import (
	"context"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
)

// Scripts are the scripts that may write, by operation.
var Scripts = map[string]*wire.Script{"set": trySetCountScript, "down": countDownScript, "delete": deleteScript}

// Read returns what a waiter reads.
func Read(ctx context.Context, c rueidis.Client, key string) (count int64, ttl time.Duration, round string, err error) {
	s, err := read(ctx, c, key)
	return s.count, s.ttl, s.round, err
}

// RoundTTL is the time to live of a round id.
const RoundTTL = roundTTL

// Synced returns the number of waiters for the latch in stageSynced.
func Synced(l *Latch) int { return inStage(l, stageSynced) }

// Unread returns the number of waiters that have not read the latch yet.
func Unread(l *Latch) int { return inStage(l, stageNew) + inStage(l, stageReading) }

func inStage(l *Latch, s stage) (n int) {
	reg := session.Of[registry](l.s)
	reg.mu.Lock()
	defer reg.mu.Unlock()
	if d := reg.entries[l.key]; d != nil {
		d.each(s, func(*waiter) { n++ })
	}
	return n
}

// Latches returns the number of latches of the client that have waiters.
func Latches(l *Latch) int {
	reg := session.Of[registry](l.s)
	reg.mu.Lock()
	defer reg.mu.Unlock()
	return len(reg.entries)
}

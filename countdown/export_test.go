package countdown

import (
	"context"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// Scripts are the scripts that may write, by operation.
var Scripts = map[string]*wire.Script{
	"set": trySetCountScript, "set for": trySetCountScript, "down": countDownScript, "delete": deleteScript, "cancel": cancelScript,
}

// Read returns what a waiter reads.
func Read(ctx context.Context, c rueidis.Client, key string) (count int64, ttl time.Duration, round string, err error) {
	s, err := read(ctx, c, key)
	return s.count, s.ttl, s.round, err
}

// Times to live of a round id and a cached reply.
const (
	RoundTTL = roundTTL
	ReplyTTL = replyTTL
)

// CachedReply is the key that caches the reply of a request.
func CachedReply(key, request string) string { return cachedReply(key, request) }

// Parked returns the number of waiters that have found the latch closed and need a
// message, 0 while a read is under way.
func Parked(l *Latch) int {
	n, reading := inStage(l, stageClosed)
	if reading {
		return 0
	}
	return n
}

// Unread returns the number of waiters that have not read the latch yet.
func Unread(l *Latch) int {
	joined, _ := inStage(l, stageNew)
	reading, _ := inStage(l, stageReading)
	return joined + reading
}

func inStage(l *Latch, s stage) (n int, reading bool) {
	reg := l.all
	reg.mu.Lock()
	defer reg.mu.Unlock()
	d := reg.entries[l.key]
	if d == nil {
		return 0, false
	}
	for w := range d.set {
		if w.stage == s {
			n++
		}
	}
	return n, d.reading
}

// Latches returns the number of latches of the client that have waiters.
func Latches(l *Latch) int {
	reg := l.all
	reg.mu.Lock()
	defer reg.mu.Unlock()
	return len(reg.entries)
}

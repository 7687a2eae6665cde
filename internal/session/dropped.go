package session

import (
	"log/slog"
	"sync"
	"time"
)

// dropped limits the log of dropped holds: a program that forgets to unlock does so all the time.
type dropped struct {
	mu         sync.Mutex
	last       time.Time // when one was logged
	suppressed int       // since then
}

// LogDropped logs an error about a hold that was dropped, at most once a second. The next entry, or
// one when the session closes, has the number of those that were not logged.
func (s *Session) LogDropped(msg string, args ...any) {
	d := &s.dropped
	d.mu.Lock()
	now := time.Now()
	if !d.last.IsZero() && now.Sub(d.last) < time.Second {
		d.suppressed++
		d.mu.Unlock()
		return
	}
	if d.suppressed > 0 {
		args = append(args, "suppressed", d.suppressed)
	}
	d.last = now
	d.suppressed = 0
	d.mu.Unlock()
	s.Logger.Error(msg, args...)
}

// flush logs the number of dropped holds that no entry has counted.
func (d *dropped) flush(log *slog.Logger) {
	d.mu.Lock()
	n := d.suppressed
	d.suppressed = 0
	d.mu.Unlock()
	if n > 0 {
		log.Error("redlatch: more holds were dropped than logged", "suppressed", n)
	}
}

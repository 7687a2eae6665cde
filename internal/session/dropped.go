package session

import (
	"log/slog"
	"sync"
	"time"
)

// Dropped limits the log of dropped holds: a program that forgets to unlock does so all the time. The zero Dropped is
// ready for use.
type Dropped struct {
	mu         sync.Mutex
	last       time.Time // when one was logged
	suppressed int       // since then
}

// LogDropped is Dropped.Log for the session. Its end is a Flush.
func (s *Session) LogDropped(msg string, args ...any) { s.dropped.Log(s.Logger, msg, args...) }

// Log logs an error about a hold that was dropped, at most once a second. The next entry, or one of Flush, has the
// number of those that were not logged.
func (d *Dropped) Log(log *slog.Logger, msg string, args ...any) {
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
	log.Error(msg, args...)
}

// Flush logs the number of dropped holds that no entry has counted.
func (d *Dropped) Flush(log *slog.Logger) {
	d.mu.Lock()
	n := d.suppressed
	d.suppressed = 0
	d.mu.Unlock()
	if n > 0 {
		log.Error("redlatch: more holds were dropped than logged", "suppressed", n)
	}
}

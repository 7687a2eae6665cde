package session

import (
	"sync"

	"github.com/redlatch/redlatch/internal/telemetry"
)

// maxWarned bounds the objects that Warnings remember: programs may make up names.
const maxWarned = 1000

// Warnings are the objects of which a client has logged a warning. The zero Warnings is ready for use.
type Warnings struct {
	mu     sync.Mutex
	logged map[telemetry.Lock]bool
}

// First reports whether l is not logged yet, and notes it. It forgets all others when they are too many.
func (w *Warnings) First(l telemetry.Lock) bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.logged[l] {
		return false
	}
	if w.logged == nil || len(w.logged) >= maxWarned {
		w.logged = make(map[telemetry.Lock]bool)
	}
	w.logged[l] = true
	return true
}

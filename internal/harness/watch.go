package harness

import (
	"bytes"
	"log/slog"
	"runtime"
	"sync"
)

// HeapInUse returns how many bytes of the heap are reachable.
func HeapInUse() int64 {
	runtime.GC()
	runtime.GC() // what a sync.Pool holds outlives one collection
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Log keeps what is logged. The zero Log is empty.
type Log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Logger returns a logger that writes to l.
func (l *Log) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// Write implements io.Writer.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// String returns everything logged so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

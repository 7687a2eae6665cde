package harness

import (
	"bytes"
	"log/slog"
	"runtime"
	"sync"
)

// HeapInUse returns the number of reachable bytes on the heap.
func HeapInUse() int64 {
	runtime.GC()
	runtime.GC() // the content of a sync.Pool survives one collection
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Log records log output. The zero Log is empty.
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

// String returns the output so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

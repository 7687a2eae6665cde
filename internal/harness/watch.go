package harness

import (
	"bytes"
	"log/slog"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
)

// GoroutinesIn counts the goroutines with a frame of that function.
func GoroutinesIn(function string) int {
	return goroutines(func(stack string) bool { return strings.Contains(stack, function) })
}

// GoroutinesNotBegun counts those that a WaitGroup has started and that have not run
// yet: GoroutinesIn does not see in what function they will be.
func GoroutinesNotBegun() int {
	return goroutines(func(stack string) bool {
		return strings.Count(stack, "\n#\t") == 1 && strings.Contains(stack, "sync.(*WaitGroup).Go")
	})
}

// goroutines counts those whose stack is as asked for.
func goroutines(is func(stack string) bool) int {
	var profile strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&profile, 1)
	// "<number of goroutines> @ <addresses>", a line for each frame, an empty line.
	_, stacks, _ := strings.Cut(profile.String(), "\n")
	sum := 0
	for stack := range strings.SplitSeq(stacks, "\n\n") {
		if is(stack) {
			number, _, _ := strings.Cut(stack, " @")
			n, _ := strconv.Atoi(number)
			sum += n
		}
	}
	return sum
}

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

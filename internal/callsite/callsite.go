// Package callsite records where the user's code acquired an object, or set up the adapter that did.
package callsite

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
)

// Site is a position in the user's code. Every acquisition records one; it is rarely printed. A
// program has few sites, so each is stored once, and for good.
type Site uint32

// sites are the frames seen so far. The zero Site is none, and the others are indexes in pcs.
var sites = struct {
	sync.RWMutex
	of  map[uintptr]frame
	pcs []uintptr
}{of: make(map[uintptr]frame), pcs: make([]uintptr, 1)}

type frame struct {
	site Site
	kind kind
}

// kind says whose code a frame is.
type kind uint8

const (
	users  kind = iota
	ours        // in this module, but for its tests and adapters
	goexit      // below the function that a goroutine runs
)

// Here returns the innermost frame outside this module of the goroutine that calls it. On a goroutine
// that this module has started it returns the outermost frame.
func Here() Site {
	var site Site
	var pcs [8]uintptr
	const own = 2 // runtime.Callers and Here
	for skip := own; ; skip += len(pcs) {
		n := runtime.Callers(skip, pcs[:])
		for _, pc := range pcs[:n] {
			f := lookUp(pc)
			if f.kind == goexit {
				return site
			}
			site = f.site
			if f.kind == users {
				return site
			}
		}

		if n < len(pcs) {
			return site
		}
	}
}

// Of returns the position of a program counter of runtime.Callers, or Here if it is 0.
func Of(pc uintptr) Site {
	if pc == 0 {
		return Here()
	}
	return lookUp(pc).site
}

// lookUp returns the frame of pc, and stores it unless it is known.
func lookUp(pc uintptr) frame {
	sites.RLock()
	f, known := sites.of[pc]
	sites.RUnlock()
	if known {
		return f
	}

	sites.Lock()
	defer sites.Unlock()

	if f, known := sites.of[pc]; known { // another caller was faster
		return f
	}

	f = frame{Site(len(sites.pcs)), kindOf(described(pc))}
	sites.of[pc], sites.pcs = f, append(sites.pcs, pc)
	return f
}

func kindOf(f runtime.Frame) kind {
	const module = "github.com/redlatch/redlatch/"
	if strings.HasPrefix(f.Function, "runtime.") {
		return goexit
	}

	path, inside := strings.CutPrefix(f.Function, module)
	if inside && !strings.HasPrefix(path, "contrib/") && !strings.HasSuffix(f.File, "_test.go") {
		return ours
	}

	return users
}

func described(pc uintptr) runtime.Frame {
	f, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	return f
}

// IsZero reports whether nothing was recorded.
func (s Site) IsZero() bool { return s == 0 }

// String returns the function, file and line.
func (s Site) String() string {
	if s == 0 {
		return "unknown"
	}

	sites.RLock()
	pc := sites.pcs[s]
	sites.RUnlock()
	f := described(pc)
	return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
}

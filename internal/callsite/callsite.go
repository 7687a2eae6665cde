// Package callsite records where the user's code acquired an object.
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
	site  Site
	inner bool // it is in this module
}

// Here returns the first frame outside this module, of those above the function that calls it. It
// skips the given number of them. Each frame that it reads takes long, even if it does not return that.
func Here(above int) Site {
	const enough = 4 // frames of this module between an acquisition and the user's code
	var site Site
	for i := range enough {
		var pc [1]uintptr
		if runtime.Callers(2+above+i, pc[:]) == 0 { // skips runtime.Callers and Here
			break
		}
		sites.RLock()
		f, known := sites.of[pc[0]]
		sites.RUnlock()
		if !known {
			f = add(pc[0])
		}
		if site = f.site; !f.inner {
			break
		}
	}
	return site
}

// add stores a frame, unless another caller has.
func add(pc uintptr) frame {
	sites.Lock()
	defer sites.Unlock()
	f, known := sites.of[pc]
	if !known {
		is := described(pc)
		f = frame{
			Site(len(sites.pcs)),
			strings.HasPrefix(is.Function, "github.com/redlatch/redlatch/") && !strings.HasSuffix(is.File, "_test.go"),
		}
		sites.of[pc], sites.pcs = f, append(sites.pcs, pc)
	}
	return f
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

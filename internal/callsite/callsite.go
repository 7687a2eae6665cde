// Package callsite records where the user's code acquired an object.
package callsite

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
)

// Site stands for a few frames of a stack. Every acquisition records one; it is rarely printed.
// A program has few sites, so each is stored once, and for good.
type Site uint32

// Frames is the most frames that a Site has.
const Frames = 4

type stack [Frames]uintptr

// sites are all sites: the zero Site is none, and the others are indexes in stacks.
var sites = struct {
	sync.RWMutex
	of     map[stack]Site
	stacks []stack
}{of: make(map[stack]Site), stacks: make([]stack, 1)}

// Here returns up to the given number of frames, starting above the function that calls
// it. They must include the user's frame, after those of this module.
func Here(above, frames int) Site {
	var s stack
	runtime.Callers(2+above, s[:frames]) // skips runtime.Callers and Here
	sites.RLock()
	site, known := sites.of[s]
	sites.RUnlock()
	if known || s[0] == 0 {
		return site
	}
	return add(s)
}

// add returns the site of a stack, and stores that unless another caller has.
func add(s stack) Site {
	sites.Lock()
	defer sites.Unlock()
	site, known := sites.of[s]
	if !known {
		site = Site(len(sites.stacks))
		sites.of[s], sites.stacks = site, append(sites.stacks, s)
	}
	return site
}

// frames returns the stack of s.
func (s Site) frames() stack {
	sites.RLock()
	defer sites.RUnlock()
	return sites.stacks[s]
}

// IsZero reports whether nothing was recorded.
func (s Site) IsZero() bool { return s == 0 }

// String returns the first position outside this module.
func (s Site) String() string {
	stack, n := s.frames(), 0
	for n < len(stack) && stack[n] != 0 {
		n++
	}
	if n == 0 {
		return "unknown"
	}
	frames := runtime.CallersFrames(stack[:n])
	for {
		f, more := frames.Next()
		if !strings.HasPrefix(f.Function, "github.com/redlatch/redlatch/") || strings.HasSuffix(f.File, "_test.go") || !more {
			return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
		}
	}
}

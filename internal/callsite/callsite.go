// Package callsite records where the user's code acquired an object.
package callsite

import (
	"fmt"
	"runtime"
	"strings"
)

// Site is a few frames of a stack. Every acquisition records one; it is rarely printed.
type Site [4]uintptr

// Here returns up to the given number of frames, starting above the function that calls
// it. They must include the user's frame, after those of this module.
func Here(above, frames int) (s Site) {
	runtime.Callers(2+above, s[:frames]) // skips runtime.Callers and Here
	return s
}

// IsZero reports whether nothing was recorded.
func (s Site) IsZero() bool { return s[0] == 0 }

// String returns the first position outside this module.
func (s Site) String() string {
	n := 0
	for n < len(s) && s[n] != 0 {
		n++
	}
	if n == 0 {
		return "unknown"
	}
	frames := runtime.CallersFrames(s[:n])
	for {
		f, more := frames.Next()
		if !strings.HasPrefix(f.Function, "github.com/redlatch/redlatch/") || strings.HasSuffix(f.File, "_test.go") || !more {
			return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
		}
	}
}

// Package callsite remembers where in the user's code something was acquired.
package callsite

import (
	"fmt"
	"runtime"
	"strings"
)

// Site is a few frames of a stack. They are paid for with every acquisition, and hardly
// ever looked at.
type Site [3]uintptr

// Here returns so many frames of the stack, from so many calls above the function that
// calls it. They are calls of this module: one that is the user's has to follow among
// these frames.
func Here(above, frames int) (s Site) {
	runtime.Callers(2+above, s[:frames]) // nor runtime.Callers and Here
	return s
}

// String returns the first line outside this module.
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

// Package callsite remembers where in the user's code something was acquired.
package callsite

import (
	"fmt"
	"runtime"
	"strings"
)

// Site is the innermost frames of a stack.
type Site [8]uintptr

// Here returns the stack of whoever called the function that calls Here.
func Here() (s Site) {
	runtime.Callers(3, s[:]) // not runtime.Callers, Here, and that function
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

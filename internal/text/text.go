// Package text makes foreign text, such as a name or the error of a server, fit for errors, logs and
// spans.
package text

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Max is the number of bytes of a foreign text that are shown.
const Max = 512

// Safe returns s, or its first Max bytes and an ellipsis. If that has control characters or is not UTF-8,
// these are escaped as in Go: a terminal obeys the former, and OTLP rejects all spans of a batch because
// of the latter.
func Safe(s string) string {
	s = Cut(s)
	if Printable(s) {
		return s
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

// Printable reports whether s is UTF-8 without control characters.
func Printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// Cut returns s, or its first Max bytes and an ellipsis.
func Cut(s string) string {
	if len(s) <= Max {
		return s
	}
	return s[:Max] + "…"
}

package text

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestSafe(t *testing.T) {
	for s, want := range map[string]string{
		"":                               "",
		`orders "größer" \ 1`:            `orders "größer" \ 1`,
		"a\x1b[31mb":                     `a\x1b[31mb`,
		"a\nb\r":                         `a\nb\r`,
		"a\xffb":                         `a\xffb`,
		"a\u202eb":                       `a\u202eb`,
		strings.Repeat("x", Max):         strings.Repeat("x", Max),
		strings.Repeat("x", Max+1):       strings.Repeat("x", Max) + "…",
		strings.Repeat("x", Max-1) + "ü": strings.Repeat("x", Max-1) + `\xc3…`,
	} {
		require.Equal(t, want, Safe(s))
		require.True(t, utf8.ValidString(Safe(s)))
	}
}

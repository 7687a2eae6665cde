package grouplock

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Golden values are those of Redisson 4.7.0; interop compares more of them with a client.
func TestFieldOf(t *testing.T) {
	for value, field := range map[string]string{
		"":                                    "t6rZwibGo2uy1OSmNVe8pg",
		"test1":                               "sMUTHC2Ql4EaCGlDp3W/MQ",
		"student:001":                         "DqvoYruF5eyLDrILcprmBw",
		strings.Repeat("0123456789abcdef", 2): "08hr0B8iaf3PoSsWAS8sWA",
		strings.Repeat("0123456789abcdef", 2) + "X": "VjlgQDRPSK889um0d9QvSg",
	} {
		require.Equal(t, field, fieldOf(value), value)
	}
	require.Equal(t, []string{"Jon6GCcO+0QSJkhre5wXYA", "oz8KQ6x92JraWxs5okiqFw"}, []string{fieldOf(Kryo5("a")[0]), fieldOf(Kryo5("b")[0])})
}

func TestKryo5(t *testing.T) {
	x := func(n int) string { return strings.Repeat("x", n) }
	for s, want := range map[string]string{
		"":      "\x03\x81",
		"a":     "\x03\x82a",
		"ab":    "\x03a\xe2",
		x(32):   "\x03" + x(31) + "\xf8",
		x(33):   "\x03\xa2" + x(33),
		x(63):   "\x03\xc0\x01" + x(63),
		x(200):  "\x03\xc9\x03" + x(200),
		x(9000): "\x03\xe9\x8c\x01" + x(9000),
		"é":     "\x03\x82\xc3\xa9",
		"aé":    "\x03\x83a\xc3\xa9",
		"日本":    "\x03\x83\xe6\x97\xa5\xe6\x9c\xac",
		"😀":     "\x03\x83\xed\xa0\xbd\xed\xb8\x80",
		"\x00":  "\x03\x82\x00",
		"a\x7f": "\x03a\xff",
	} {
		require.Equal(t, []string{want}, Kryo5(s), "%q", s)
	}
}

func TestLongs(t *testing.T) {
	require.Equal(t, []string{"7", "-9223372036854775808"}, Longs(7, -1<<63))
}

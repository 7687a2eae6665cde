package grouplock

import (
	"encoding/binary"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Longs returns the values that a Java client with StringCodec or LongCodec has for numbers: their decimal digits.
func Longs(numbers ...int64) []string {
	values := make([]string, len(numbers))
	for i, n := range numbers {
		values[i] = strconv.FormatInt(n, 10)
	}
	return values
}

// Kryo5 returns the values that a Java client with Kryo5Codec, the default since Redisson 3.19, has for strings. The
// strings should be UTF-8.
func Kryo5(strings ...string) []string {
	values := make([]string, len(strings))
	for i, s := range strings {
		values[i] = string(kryo5(s))
	}
	return values
}

// kryo5 returns a string as Kryo 5 writes it with its class. Short ASCII ends with a byte whose highest bit is set. All
// else begins with the number of UTF-16 units plus one, in a byte with that bit, which has six bits of the number, and
// bytes with seven bits each.
func kryo5(s string) []byte {
	const classOfStrings = 3
	out := []byte{classOfStrings}
	units := utf16.Encode([]rune(s))
	isASCII := !slices.ContainsFunc(units, func(u uint16) bool { return u >= utf8.RuneSelf })
	if isASCII && len(s) > 1 && len(s) <= 32 {
		out = append(out, s...)
		out[len(out)-1] |= 0x80
		return out
	}

	length := uint64(len(units)) + 1
	first := byte(length&0x3f) | 0x80
	if length >>= 6; length == 0 {
		out = append(out, first)
	} else {
		out = binary.AppendUvarint(append(out, first|0x40), length)
	}
	for _, u := range units { // each by itself, also of a pair
		if u < 0x80 {
			out = append(out, byte(u))
		} else if u < 0x800 {
			out = append(out, 0xc0|byte(u>>6), 0x80|byte(u&0x3f))
		} else {
			out = append(out, 0xe0|byte(u>>12), 0x80|byte(u>>6&0x3f), 0x80|byte(u&0x3f))
		}
	}
	return out
}

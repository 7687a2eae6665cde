package grouplock

import (
	"encoding/base64"
	"encoding/binary"
	"math/bits"
)

// fieldOf returns the name under which Redisson has a value in the hash of a group: the HighwayHash of 128 bits
// of its bytes, with Redisson's key, in Base64.
func fieldOf(value string) string {
	h := newHighway()
	for ; len(value) >= packetSize; value = value[packetSize:] {
		h.update([]byte(value[:packetSize]))
	}
	if value != "" {
		h.last(value)
	}

	var sum [16]byte
	a, b := h.sum()
	binary.BigEndian.PutUint64(sum[:8], a)
	binary.BigEndian.PutUint64(sum[8:], b)
	return base64.RawStdEncoding.EncodeToString(sum[:])
}

const packetSize = 32

// highway is the state of a HighwayHash (Alakuijala, Cox and Wassenberg, "Fast keyed hash/pseudo-random function using
// SIMD multiply and permute", arXiv:1612.06257).
type highway struct{ v0, v1, mul0, mul1 [4]uint64 }

func newHighway() *highway {
	key := [4]uint64{0x9e3779b97f4a7c15, 0xf39cc0605cedc834, 0x1082276bf3a27251, 0xf86c6a11d0c18e95}
	h := &highway{
		mul0: [4]uint64{0xdbe6d5d5fe4cce2f, 0xa4093822299f31d0, 0x13198a2e03707344, 0x243f6a8885a308d3},
		mul1: [4]uint64{0x3bd39e10cb0ef593, 0xc0acf169b5f18a8c, 0xbe5466cf34e90c6c, 0x452821e638d01377},
	}
	for i, k := range key {
		h.v0[i] = h.mul0[i] ^ k
		h.v1[i] = h.mul1[i] ^ bits.RotateLeft64(k, 32)
	}
	return h
}

// update adds a packet.
func (h *highway) update(packet []byte) {
	for i := range 4 {
		h.v1[i] += h.mul0[i] + binary.LittleEndian.Uint64(packet[8*i:])
		h.mul0[i] ^= uint64(uint32(h.v1[i])) * (h.v0[i] >> 32)
		h.v0[i] += h.mul1[i]
		h.mul1[i] ^= uint64(uint32(h.v0[i])) * (h.v1[i] >> 32)
	}
	zipperAdd(&h.v0, &h.v1)
	zipperAdd(&h.v1, &h.v0)
}

// zipper has, for each byte of a pair of lanes after a merge, its place in the pair before.
var zipper = [16]uint{3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7}

// zipperAdd adds the lanes of from, with the bytes of each pair permuted, to the lanes of to.
func zipperAdd(to, from *[4]uint64) {
	for pair := 0; pair < 4; pair += 2 {
		var merged [2]uint64
		for i, at := range zipper {
			b := from[pair+int(at/8)] >> (at % 8 * 8) & 0xff
			merged[i/8] |= b << (i % 8 * 8)
		}
		to[pair] += merged[0]
		to[pair+1] += merged[1]
	}
}

// last adds the rest of the input, 1 to 31 bytes.
func (h *highway) last(rest string) {
	n := len(rest)
	for i := range 4 {
		h.v0[i] += uint64(n)<<32 + uint64(n)
		h.v1[i] = uint64(bits.RotateLeft32(uint32(h.v1[i]>>32), n))<<32 | uint64(bits.RotateLeft32(uint32(h.v1[i]), n))
	}

	var packet [packetSize]byte
	whole := n &^ 3
	copy(packet[:], rest[:whole])
	tail := rest[whole:]
	if n&16 != 0 {
		copy(packet[28:], rest[n-4:])
	} else if tail != "" {
		packet[16] = tail[0]
		packet[17] = tail[len(tail)/2]
		packet[18] = tail[len(tail)-1]
	}
	h.update(packet[:])
}

// sum returns the hash. The state is spent.
func (h *highway) sum() (a, b uint64) {
	for range 6 {
		var packet [packetSize]byte
		for i, from := range []int{2, 3, 0, 1} {
			binary.LittleEndian.PutUint64(packet[8*i:], bits.RotateLeft64(h.v0[from], 32))
		}
		h.update(packet[:])
	}
	return h.v0[0] + h.mul0[0] + h.v1[2] + h.mul1[2], h.v0[1] + h.mul0[1] + h.v1[3] + h.mul1[3]
}

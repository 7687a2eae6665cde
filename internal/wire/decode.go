package wire

import (
	"errors"
	"math"

	"github.com/redis/rueidis"
)

// ErrReply is the error for a reply that a request cannot have. Its outcome is unknown.
var ErrReply = errors.New("redlatch: the server's reply is not one to this request")

// MaxToken is the largest fencing token. The scripts know it too.
const MaxToken = 1<<53 - 1

// Range is what a number in a reply can be, both ends included.
type Range struct{ Least, Most int64 }

// Ranges of the replies of several requests.
var (
	Any    = Range{math.MinInt64, math.MaxInt64}
	Flags  = Range{0, 1}
	Tokens = Range{0, MaxToken}
	// Times has times in ms, and less than 0 for those that do not exist. See Duration.
	Times = Range{-2, math.MaxInt64}
)

// Number decodes a number in a list. An error there is no error of the server: that is a whole reply.
func (r Range) Number(m rueidis.RedisMessage) (int64, error) {
	if !m.IsInt64() {
		return 0, ErrReply
	}
	n, err := m.ToInt64()
	if err == nil && (n < r.Least || n > r.Most) {
		return 0, ErrReply
	}
	return n, err
}

// Number decodes a reply that is a number in a range.
func Number(reply rueidis.RedisResult, r Range) (int64, error) {
	m, err := reply.ToMessage()
	if err != nil {
		return 0, err
	}
	return r.Number(m)
}

// Bool decodes a reply of 1 or 0.
func Bool(reply rueidis.RedisResult) (bool, error) {
	n, err := Number(reply, Flags)
	return n == 1, err
}

// Numbers decodes a reply of n numbers. If there are several ranges, the numbers take turns in them.
func Numbers(reply rueidis.RedisResult, n int, ranges ...Range) ([]int64, error) {
	parts, err := List(reply, n, n)
	if err != nil {
		return nil, err
	}
	return NumbersIn(parts, ranges...)
}

// NumbersIn is Numbers for the elements of a list.
func NumbersIn(parts []rueidis.RedisMessage, ranges ...Range) (numbers []int64, err error) {
	numbers = make([]int64, len(parts))
	for i, part := range parts {
		if numbers[i], err = ranges[i%len(ranges)].Number(part); err != nil {
			return nil, err
		}
	}
	return numbers, nil
}

// List decodes a reply that is a list of at least and at most so many elements.
func List(reply rueidis.RedisResult, least, most int) ([]rueidis.RedisMessage, error) {
	m, err := reply.ToMessage()
	if err != nil {
		return nil, err
	}
	return Elements(m, least, most)
}

// Elements is List for a list in a list.
func Elements(m rueidis.RedisMessage, least, most int) ([]rueidis.RedisMessage, error) {
	if parts, err := m.ToArray(); err == nil && least <= len(parts) && len(parts) <= most {
		return parts, nil
	}
	return nil, ErrReply
}

// Text decodes a string in a list.
func Text(m rueidis.RedisMessage) (string, error) {
	if !m.IsString() {
		return "", ErrReply
	}
	return m.ToString()
}

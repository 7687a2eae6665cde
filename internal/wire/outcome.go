package wire

import (
	"errors"
	"net"

	"github.com/redis/rueidis"
)

// Outcome classifies a failed request.
type Outcome int

// Outcomes of a failed request.
const (
	Refused Outcome = iota // no effect; repeating it would fail again
	Passing                // no effect; the reason may be temporary
	Unknown                // it may have run, or may still run
)

// OutcomeOf classifies the error of a script. After an error reply nothing was done, unless a
// key left the node while the script ran; after a failed dial, or while the server does not
// answer, nothing was sent.
func OutcomeOf(err error) Outcome {
	if errors.Is(err, ErrWrongType) {
		return Refused
	}

	switch meaningOf(err) {
	case noReply:
	case cutShort:
		return Unknown
	case trouble, replica, moved, divided, deliberate:
		return Passing
	default:
		return Refused
	}

	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" ||
		errors.Is(err, rueidis.ErrNoSlot) || errors.Is(err, errNotSent) || errors.Is(err, errSilent) {
		return Passing
	}

	return Unknown
}

// isDeliberate reports whether the server rejects all writes until its operator acts.
func isDeliberate(err error) bool { return meaningOf(err) == deliberate }

// IsTurnedAway reports whether err says that the server rejects all writes, and not only for a moment.
func IsTurnedAway(err error) bool {
	m := meaningOf(err)
	return m == deliberate || m == replica
}

// IsRefused reports whether err says that a request had no effect and would fail again.
func IsRefused(err error) bool { return OutcomeOf(err) == Refused }

// IsUnknown reports whether err leaves open what a request has done.
func IsUnknown(err error) bool { return err != nil && OutcomeOf(err) == Unknown }

// IsMoving reports whether err says that the keys of a script are not all on one node, because
// their cluster slot is moving.
func IsMoving(err error) bool {
	m := meaningOf(err)
	return m == divided || m == cutShort
}

// ErrWrongType is the client's own error for a key with a value of another type.
var ErrWrongType = errors.New("the key has a value of another type")

// IsWrongType reports whether err says that a key has a value of another type.
func IsWrongType(err error) bool { return errors.Is(err, ErrWrongType) || meaningOf(err) == wrongType }

package wire

import (
	"errors"
	"net"
	"slices"
	"strings"

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
	if reply := replyIn(err); reply != nil {
		if says(reply.Error(), nonLocal) {
			return Unknown
		}
		if reply.IsLoading() || reply.IsClusterDown() || reply.IsTryAgain() {
			return Passing
		}
		for _, reason := range []string{"BUSY", "READONLY", "MASTERDOWN", "MOVED", "ASK", "max number of clients"} {
			if says(reply.Error(), reason) {
				return Passing
			}
		}
		if isDeliberate(err) {
			return Passing
		}
		return Refused
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" ||
		errors.Is(err, rueidis.ErrNoSlot) || errors.Is(err, errNotSent) || errors.Is(err, errSilent) {
		return Passing
	}
	return Unknown
}

// isDeliberate reports whether the server rejects all writes until its operator acts.
func isDeliberate(err error) bool {
	reply := replyIn(err)
	return reply != nil && slices.ContainsFunc([]string{"OOM", "MISCONF", "NOREPLICAS"}, func(reason string) bool {
		return says(reply.Error(), reason)
	})
}

// IsRefused reports whether err says that a request had no effect and would fail again.
func IsRefused(err error) bool { return OutcomeOf(err) == Refused }

// IsUnknown reports whether err leaves open what a request has done.
func IsUnknown(err error) bool { return err != nil && OutcomeOf(err) == Unknown }

// nonLocal is the server's error for a script that uses an undeclared key on another node.
const nonLocal = "Script attempted to access a non local key"

// IsMoving reports whether err says that the keys of a script are not all on one node, because
// their cluster slot is moving.
func IsMoving(err error) bool {
	var reply *rueidis.RedisError
	return errors.As(err, &reply) && (reply.IsTryAgain() || says(reply.Error(), nonLocal))
}

// ErrWrongType is the client's own error for a key with a value of another type.
var ErrWrongType = errors.New("the key has a value of another type")

// IsWrongType reports whether err says that a key has a value of another type.
func IsWrongType(err error) bool {
	if reply := replyIn(err); reply != nil {
		return says(reply.Error(), "WRONGTYPE") || strings.Contains(reply.Error(), "value is not an integer")
	}
	return errors.Is(err, ErrWrongType)
}

// replyIn returns the server's reply that err is or contains, or nil.
func replyIn(err error) *rueidis.RedisError {
	if err == nil { // the variable below is an allocation
		return nil
	}
	var reply *rueidis.RedisError
	if errors.As(err, &reply) && !reply.IsNil() {
		return reply
	}
	return nil
}

// says reports whether the text of a server's error, without the code ERR, begins with
// reason. Servers before 7.0 prefix a command's error with its position in the script.
func says(text, reason string) bool {
	if position, message, ok := strings.Cut(text, "@user_script"); ok && strings.HasPrefix(position, "Error running script") {
		return strings.Contains(message, ": "+reason) || strings.Contains(message, ": -"+reason)
	}
	return strings.HasPrefix(text, reason)
}

package wire

import (
	"errors"
	"net"
	"strings"

	"github.com/redis/rueidis"
)

// Outcome is what is known of a request after its error.
type Outcome int

// What can be known.
const (
	Refused Outcome = iota // it had no effect, and will not have any if repeated
	Passing                // it had no effect, but the reason may pass
	Unknown                // it may have had its effect, or have it later
)

// OutcomeOf classifies the error of a script: a reply of the server says that
// nothing was done, a dial that failed that nothing was sent.
func OutcomeOf(err error) Outcome {
	if reply, ok := rueidis.IsRedisErr(err); ok {
		if reply.IsLoading() || reply.IsClusterDown() || reply.IsTryAgain() {
			return Passing
		}
		for _, reason := range []string{"BUSY", "READONLY", "MASTERDOWN", "OOM", "MISCONF", "NOREPLICAS", "MOVED", "ASK", "max number of clients"} {
			if says(reply.Error(), reason) {
				return Passing
			}
		}
		return Refused
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" || errors.Is(err, rueidis.ErrNoSlot) {
		return Passing
	}
	return Unknown
}

// IsWrongType reports whether err is the server's refusal of a key of another
// type.
func IsWrongType(err error) bool {
	reply, ok := rueidis.IsRedisErr(err)
	return ok && says(reply.Error(), "WRONGTYPE")
}

// says reports whether the text of a server's error, without the code ERR,
// begins with reason. Servers before 7.0 put the error of a command in a script
// behind where it happened.
func says(text, reason string) bool {
	if where, what, ok := strings.Cut(text, "@user_script"); ok && strings.HasPrefix(where, "Error running script") {
		return strings.Contains(what, ": "+reason) || strings.Contains(what, ": -"+reason)
	}
	return strings.HasPrefix(text, reason)
}

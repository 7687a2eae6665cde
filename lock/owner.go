package lock

import (
	"context"
	"strconv"

	"github.com/google/uuid"
)

// Owner identifies the holder of a lock on the server, or with WithOwner a logical thread of
// this process: the id of a client and a number, for which Redisson uses the id of a thread.
// Acquisitions under the same WithOwner are one logical thread: the second re-enters the
// first. The zero Owner is no owner. Owners are comparable.
type Owner struct{ id string }

// NewOwner returns the owner with that number in the client with that id, a UUID in its
// usual form of 36 characters. For another id it returns an error that matches
// ErrInvalid. Most callers want Client.NewOwner, which picks an unused number.
func NewOwner(clientID string, number uint64) (Owner, error) {
	if !isUUID(clientID) {
		return Owner{}, notOwner(clientID, "the id of a client is a UUID")
	}
	id := make([]byte, 0, uuidLen+len(":18446744073709551615"))
	return Owner{id: string(strconv.AppendUint(append(append(id, clientID...), ':'), number, 10))}, nil
}

// uuidLen is the length of a UUID with hyphens.
const uuidLen = 36

func isUUID(s string) bool {
	_, err := uuid.Parse(s)
	return len(s) == uuidLen && err == nil
}

// ParseOwner parses the result of [Owner.String], which Redisson also uses in a lock's
// hash: "<UUID>:<number>". It serves to ask for the holds of a Java thread (HoldCount). For
// another form it returns an error that matches ErrInvalid.
func ParseOwner(s string) (Owner, error) {
	if len(s) > uuidLen+1 && s[uuidLen] == ':' && isUUID(s[:uuidLen]) {
		if _, err := strconv.ParseUint(s[uuidLen+1:], 10, 64); err == nil {
			return Owner{id: s}, nil
		}
	}
	return Owner{}, notOwner(s, "an owner is <UUID>:<number>")
}

func notOwner(s, reason string) error {
	return &Error{Op: "parse", Kind: "owner", Name: s, Err: invalid("%s", reason)}
}

// String returns the owner's id on the server, "" for the zero Owner.
func (o Owner) String() string { return o.id }

// IsZero reports whether o is the zero Owner.
func (o Owner) IsZero() bool { return o == Owner{} }

type ownerKey struct{}

// WithOwner returns a context under which every acquisition of any lock is by the logical
// thread o, which enables re-entry. Without it each acquisition is a logical thread of its
// own, and a lock taken twice waits for itself like a sync.Mutex. All users of the context,
// including child goroutines, are the same logical thread. The zero Owner cancels an outer
// WithOwner.
//
// Re-entry is local: if o holds the lock in this process, by a lock object of the same
// client and kind, another Lock adds a hold to the same lease on the server. It sends a
// request only if the new hold outlasts that lease. If the lease has expired, Lock acquires
// the lock anew. Each hold ends at its own time, and the last Unlock releases the lock. An
// owner means nothing to other processes.
func WithOwner(ctx context.Context, o Owner) context.Context {
	return context.WithValue(ctx, ownerKey{}, o)
}

// OwnerFrom returns the owner that WithOwner stored in ctx, and whether there is one.
func OwnerFrom(ctx context.Context) (Owner, bool) {
	o, _ := ctx.Value(ownerKey{}).(Owner)
	return o, !o.IsZero()
}

// OwnerOf returns the id under which the server has the lock of h: the id of the client and a
// number. It is for logs and traces, and not for WithOwner: the holds of one owner share
// it, and so do holds that the client passes the lock on to. For a lock of several locks it returns the owner of WithOwner, and for
// a hold without an owner the zero Owner.
func OwnerOf(h Hold) Owner {
	if h, ok := h.(interface{ Owner() Owner }); ok {
		return h.Owner()
	}
	return Owner{}
}

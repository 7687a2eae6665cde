package lock

import (
	"context"
	"fmt"
	"strconv"

	"github.com/google/uuid"
)

// Owner is who holds a lock, as it stands on the server: the id of a client
// and a number, where Redisson puts the id of a thread. Two acquisitions under
// the same owner are one logical thread: the second re-enters the first. The
// zero Owner is nobody. Owners are comparable.
type Owner struct{ id string }

// NewOwner returns the owner of that number in the client with that id, which
// is a UUID in its usual text form of 36 characters. It returns an error that
// matches ErrInvalid for any other id. Most callers want Client.NewOwner,
// which picks a number nobody else has.
func NewOwner(clientID string, number uint64) (Owner, error) {
	if !isUUID(clientID) {
		return Owner{}, fmt.Errorf("%w: client id %q is not a UUID", ErrInvalid, clientID)
	}
	id := make([]byte, 0, uuidLen+len(":18446744073709551615"))
	return Owner{id: string(strconv.AppendUint(append(append(id, clientID...), ':'), number, 10))}, nil
}

// uuidLen is the length of a UUID's text form with hyphens.
const uuidLen = 36

func isUUID(s string) bool {
	_, err := uuid.Parse(s)
	return len(s) == uuidLen && err == nil
}

// ParseOwner reads an owner from the text that [Owner.String] gives, or that
// Redisson puts into a lock's hash: "<UUID>:<number>". It serves to hand a
// lock over to another process. It returns an error that matches ErrInvalid if
// s has another form.
func ParseOwner(s string) (Owner, error) {
	if len(s) > uuidLen+1 && s[uuidLen] == ':' && isUUID(s[:uuidLen]) {
		if _, err := strconv.ParseUint(s[uuidLen+1:], 10, 64); err == nil {
			return Owner{id: s}, nil
		}
	}
	return Owner{}, fmt.Errorf("%w: owner %q is not <UUID>:<number>", ErrInvalid, s)
}

// String returns the owner's id on the server, or "" for the zero Owner.
func (o Owner) String() string { return o.id }

// IsZero reports whether o is nobody.
func (o Owner) IsZero() bool { return o == Owner{} }

type ownerKey struct{}

// WithOwner returns a context under which every acquisition, of any lock, is
// made as o. It is how re-entry is asked for: without it each acquisition is
// an owner of its own, and a lock taken twice waits for itself like a
// sync.Mutex. Whoever gets this context, child goroutines included, is the
// same logical thread. The zero Owner undoes an outer WithOwner.
func WithOwner(ctx context.Context, o Owner) context.Context {
	return context.WithValue(ctx, ownerKey{}, o)
}

// OwnerFrom returns the owner that WithOwner put into ctx, and whether there
// is one.
func OwnerFrom(ctx context.Context) (Owner, bool) {
	o, _ := ctx.Value(ownerKey{}).(Owner)
	return o, !o.IsZero()
}

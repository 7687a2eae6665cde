package multilock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// group is the part that Multi and Red share.
type group struct {
	s    *session.Session
	info telemetry.Lock
	err  error // an invalid member
}

// newGroup returns a group of members with these names.
func newGroup(s *session.Session, kind string, names []string) group {
	g := group{s: s, info: telemetry.Lock{Kind: kind}}
	if len(names) == 0 {
		g.err = fmt.Errorf("%w: %s lock without members", lock.ErrInvalid, kind)
	}
	var unique []string
	for _, name := range names {
		if !slices.Contains(unique, name) { // members on several servers may share a name
			unique = append(unique, name)
		}
	}
	g.info.Name = strings.Join(unique, ",")
	return g
}

// badMember returns the error of member i, which is m.
func badMember(kind string, i int, m lock.Locker) error {
	return fmt.Errorf("%w: member %d of a %s lock is nil or of a wrong type: %T", lock.ErrInvalid, i+1, kind, m)
}

// check returns an error if an attempt under ctx is pointless.
func (g *group) check(ctx context.Context) error {
	if g.err != nil {
		return g.err
	}
	if err := g.s.Check(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	return nil
}

// exceptLost returns err without the errors that report the loss of a hold.
func exceptLost(err error) error {
	if !errors.Is(err, lock.ErrLost) {
		return err
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if _, lost := err.(*lock.LostError); lost || !ok {
		return nil
	}
	var rest []error
	for _, e := range joined.Unwrap() {
		rest = append(rest, exceptLost(e))
	}
	return errors.Join(rest...)
}

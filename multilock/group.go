package multilock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// group is the part that Multi and Red share: the members and their description.
type group struct {
	s       *session.Session
	members []lock.Locker
	info    telemetry.Lock
	err     error // an invalid member
}

func newGroup(s *session.Session, kind string, members []lock.Locker) group {
	g := group{s: s, members: members, info: telemetry.Lock{Kind: kind}}
	if len(members) == 0 {
		g.err = fmt.Errorf("%w: %s lock without members", lock.ErrInvalid, kind)
	}
	var names []string
	for i, m := range members {
		if isNil(m) {
			g.err = fmt.Errorf("%w: member %d of a %s lock is nil", lock.ErrInvalid, i+1, kind)
			return g
		}
		if name := m.Name(); !slices.Contains(names, name) { // members on several servers may share a name
			names = append(names, name)
		}
	}
	g.info.Name = strings.Join(names, ",")
	return g
}

func isNil(m lock.Locker) bool {
	if m == nil {
		return true
	}
	v := reflect.ValueOf(m)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// equal reports whether two members of an unknown type are the same.
func equal(a, b lock.Locker) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
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

var joinedType = reflect.TypeOf(errors.Join(lock.ErrLost))

// exceptLost returns err without the errors that report the loss of a hold.
func exceptLost(err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok && reflect.TypeOf(err) == joinedType {
		var rest []error
		for _, e := range joined.Unwrap() {
			rest = append(rest, exceptLost(e))
		}
		return errors.Join(rest...)
	}
	if errors.Is(err, lock.ErrLost) {
		return nil
	}
	return err
}

package multilock

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// ranked is a member and what determines its rank in the order of all locks.
type ranked struct {
	member lock.Locker
	lock   *locking.Lock // nil for a Locker of another module
	server session.Server
	slot   int
	key    string
}

// known is 1 if the server and the key are known, and otherwise 0.
func (r ranked) known() int {
	if r.lock == nil {
		return 0
	}
	return 1
}

// rank returns the members in the order in which every Multi acquires them: members of
// another module first, then by server, slot and key. Locks whose session is not in servers
// come before those whose session is.
func (m *Multi) rank(servers map[*session.Session]session.Server) []ranked {
	all := make([]ranked, len(m.members))
	for i, member := range m.members {
		r := ranked{member: member, key: member.Name()}
		if l, ok := locking.Find(member); ok {
			r.lock, r.key, r.server = l, l.Key(), servers[l.Session()]
			if l.Session().Cluster() {
				r.slot = wire.Slot(r.key)
			}
		}
		all[i] = r
	}
	slices.SortStableFunc(all, func(a, b ranked) int {
		return cmp.Or(
			cmp.Compare(a.known(), b.known()), cmp.Compare(a.server.ID, b.server.ID), cmp.Compare(a.server.Database, b.server.Database),
			cmp.Compare(a.slot, b.slot), cmp.Compare(a.key, b.key))
	})
	return all
}

// same reports whether both are known to be the same lock.
func (r ranked) same(other ranked) bool {
	switch {
	case r.key != other.key:
		return false
	case r.lock != nil && other.lock != nil:
		return r.lock.Session() == other.lock.Session() || r.server == other.server && r.server.ID != ""
	default:
		return equal(r.member, other.member)
	}
}

// checkDuplicates returns an error if a lock occurs twice among the ranked members.
func checkDuplicates(all []ranked) error {
	for i, r := range all {
		if slices.ContainsFunc(all[:i], r.same) {
			return fmt.Errorf("%w: duplicate member %q", lock.ErrInvalid, r.member.Name())
		}
	}
	return nil
}

// inOrder returns the members in order. It identifies the servers if there are several.
func (m *Multi) inOrder(ctx context.Context) ([]ranked, error) {
	for _, r := range m.known {
		if r.lock == nil {
			continue
		}
		if err := r.lock.Check(ctx); err != nil {
			return nil, err
		}
	}
	if len(m.sessions) < 2 {
		return m.known, nil
	}
	answers := make([]session.Server, len(m.sessions))
	var pending sync.WaitGroup
	for i, s := range m.sessions {
		if answers[i] = s.KnownServer(); answers[i].ID != "" {
			continue
		}
		// The error is ignored: the rank of a server that does not respond matters little,
		// because its members cannot be acquired either.
		pending.Go(func() { answers[i], _ = s.Server(ctx) })
	}
	pending.Wait()
	servers := make(map[*session.Session]session.Server)
	for i, s := range m.sessions {
		servers[s] = answers[i]
	}
	all := m.rank(servers)
	return all, checkDuplicates(all)
}

// batch returns the locks at the beginning of next that one script can acquire, or nil.
func batch(ctx context.Context, next []ranked) []*locking.Lock {
	if len(next) < 2 {
		return nil
	}
	locks := make([]*locking.Lock, 0, len(next))
	for _, r := range next {
		if r.lock == nil {
			break
		}
		locks = append(locks, r.lock)
	}
	if len(locks) < 2 {
		return nil
	}
	if n := locking.Together(ctx, locks); n > 1 {
		return locks[:n]
	}
	return nil
}

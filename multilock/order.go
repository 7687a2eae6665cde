package multilock

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// servers are the servers of clients, as far as they are known.
type servers map[*session.Session]session.Server

// sort returns the locks in the order in which every Multi acquires them: by server, hash
// tag and key. Unknown servers come first. The hash tag counts without a cluster too, because the only
// node of a cluster is a single server for some clients.
func (known servers) sort(locks []*engine.Lock) []*engine.Lock {
	return slices.SortedStableFunc(slices.Values(locks), func(a, b *engine.Lock) int {
		at := known[a.Session()]
		bt := known[b.Session()]
		return cmp.Or(cmp.Compare(at.ID, bt.ID), cmp.Compare(at.Database, bt.Database),
			cmp.Compare(wire.HashTag(a.Key()), wire.HashTag(b.Key())), cmp.Compare(a.Key(), b.Key()))
	})
}

// same reports whether two locks are known to be the same.
func (known servers) same(a, b *engine.Lock) bool {
	server := known[a.Session()]
	return a.Key() == b.Key() && (a.Session() == b.Session() || server == known[b.Session()] && server.ID != "")
}

const duplicate = "duplicate member"

// checkDuplicates returns an error with that problem if two members are the same.
func checkDuplicates[L interface{ Name() string }](members []L, same func(a, b L) bool, problem string) error {
	for i, m := range members {
		if slices.ContainsFunc(members[:i], func(other L) bool { return same(m, other) }) {
			return fmt.Errorf("%w: %s %q (number %d)", lock.ErrInvalid, problem, m.Name(), i+1)
		}
	}
	return nil
}

// checkMembers returns an error if two of the locks that m consists of are the same: m would wait for
// itself.
func (m *Multi) checkMembers(known servers) error {
	all := slices.Clone(m.locks)
	for _, red := range m.reds {
		all = append(all, red.members...)
	}
	sameStore := func(a, b engine.StoreLock) bool { return a.ID() == b.ID() }
	return cmp.Or(checkDuplicates(all, known.same, duplicate), checkDuplicates(m.stores, sameStore, duplicate))
}

// inOrder returns the locks in order, and their servers, and sets a.certain if that order is certain: then a caller
// may wait for one of them however long it holds others. It identifies the servers if there are
// several clients.
//
// It is certain for the locks of one server. The order of several depends on their identities,
// about which clients can disagree: one may not have noticed yet that a server was restarted,
// or may not be permitted to see its run id. A Redlock has several servers, and another store has no order with
// these.
func (m *Multi) inOrder(ctx context.Context, a *acquisition) ([]*engine.Lock, servers) {
	a.certain = m.onlyLocks()
	if len(m.reds) == 0 && len(m.sessions) < 2 {
		return m.locks, nil
	}

	answers := make([]session.Server, len(m.sessions))
	var pending sync.WaitGroup
	for i, s := range m.sessions {
		// The error is ignored: the rank of a server that does not respond matters little,
		// because its members cannot be acquired either.
		pending.Go(func() { answers[i], _ = s.Server(ctx) })
	}

	pending.Wait()
	known := make(servers)
	for i, s := range m.sessions {
		known[s] = answers[i]
		a.certain = a.certain && answers[i].ID != "" && answers[i] == answers[0]
	}
	return known.sort(m.locks), known
}

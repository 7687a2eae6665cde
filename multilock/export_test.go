package multilock

import "github.com/redlatch/redlatch/internal/session"

// NamedHolds returns the number of named owners for which the client of m keeps holds.
func NamedHolds(m *Multi) int {
	n := session.Of[namedHolds](m.s)
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.holds)
}

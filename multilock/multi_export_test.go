package multilock

import "github.com/redlatch/redlatch/internal/session"

// NamedHolds returns of how many owners that were named the client of m keeps holds.
func NamedHolds(m *Multi) int {
	n := session.Of[namedHolds](m.s)
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.holds)
}

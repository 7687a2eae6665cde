package harness

import (
	"testing"
	"time"

	"github.com/redlatch/redlatch"
)

// Stats is the sum of the Stats of several clients.
func Stats(clients ...*redlatch.Client) redlatch.Stats {
	var sum redlatch.Stats
	for _, c := range clients {
		s := c.Stats()
		sum.Waiting += s.Waiting
		sum.Attempting += s.Attempting
		sum.Background += s.Background
	}
	return sum
}

// Waiting reports whether n callers of these clients are parked and no attempt is in progress.
func Waiting(n int, clients ...*redlatch.Client) bool {
	s := Stats(clients...)
	return s.Waiting == n && s.Attempting == 0
}

// Waits blocks until Waiting(n, clients...) is true. The test fails after 10 s.
func Waits(t testing.TB, n int, clients ...*redlatch.Client) {
	t.Helper()
	Eventually(t, 10*time.Second, "waiting callers", func() bool { return Waiting(n, clients...) })
}

// Idle blocks until the clients have nothing in progress, for callers or in the background.
func Idle(t testing.TB, clients ...*redlatch.Client) {
	t.Helper()
	Eventually(t, 20*time.Second, "idle clients", func() bool { return Stats(clients...) == redlatch.Stats{} })
}

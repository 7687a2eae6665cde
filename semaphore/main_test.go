package semaphore_test

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]func(args []string) error{
		"share": shareWorker, "permit holder": permitHolder, "permit waiter": permitWaiter,
	})
}

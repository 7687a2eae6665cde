package semaphore_test

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// workers are what processes that tests start can do, by name. The files with those tests
// add theirs.
var workers = map[string]func(args []string) error{"permit waiter": permitWaiter}

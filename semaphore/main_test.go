package semaphore_test

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// workers are the functions of the processes that tests start, by name. Other files add theirs.
var workers = map[string]func(args []string) error{"permit waiter": permitWaiter}

package multilock_test

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// workers are the tasks of processes started by tests, by name. Each file with such tests
// adds its own.
var workers = map[string]func(args []string) error{}

var _, _ lock.Locker = (*multilock.Multi)(nil), (*multilock.Red)(nil)

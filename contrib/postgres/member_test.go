package pglock_test

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
)

func TestMember(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, k kind, s *server) {
		name := "member-" + k.name
		harness.TestMember(t, k.make(t, newPool(t, s.addr())).Lock(name), k.make(t, newPool(t, s.addr())).Lock(name))
	})
}

package zklock

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
)

func TestMember(t *testing.T) {
	t.Parallel()
	servers := []string{common.addr(t)}
	harness.TestMember(t, open(t, servers).Lock("member"), open(t, servers).Lock("member"))
}

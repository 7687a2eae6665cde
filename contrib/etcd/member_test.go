//go:build linux

package etcdlock_test

import (
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
)

func TestMember(t *testing.T) {
	t.Parallel()
	harness.TestMember(t, locks(t, []string{shared(t)}).Lock("member"), locks(t, []string{shared(t)}).Lock("member"))
}

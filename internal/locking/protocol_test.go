package locking_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/locking"
)

func TestReleasedBy(t *testing.T) {
	for n, want := range map[int64]locking.Released{
		0: {State: locking.NotHeld},
		1: {State: locking.StillHeld},
		2: {State: locking.Free},
		5: {State: locking.Free, Receivers: 3},
	} {
		require.Equal(t, want, locking.ReleasedBy(n, false), n)
		if want.State == locking.Free {
			want.Receivers = -1
		}
		require.Equal(t, want, locking.ReleasedBy(n, true), n)
	}
}

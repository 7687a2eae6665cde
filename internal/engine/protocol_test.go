package engine_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
)

func TestReleasedBy(t *testing.T) {
	for n, want := range map[int64]engine.Release{
		0: {State: engine.NotHeld},
		1: {State: engine.StillHeld},
		2: {State: engine.Free},
		5: {State: engine.Free, Receivers: 3},
	} {
		require.Equal(t, want, engine.ReleasedBy(n, false), n)
		if want.State == engine.Free {
			want.Receivers = -1
		}
		require.Equal(t, want, engine.ReleasedBy(n, true), n)
	}
}

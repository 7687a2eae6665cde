package engine

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheOldestLossesAreForgotten(t *testing.T) {
	var l lostHolds
	all := make([]Hold, maxLost+2)
	for i := range all {
		l.add(&all[i])
	}
	l.remove(&all[0]) // it is not there
	require.Len(t, l.all, maxLost)
	require.Same(t, &all[2], l.all[0])
	l.remove(&all[3])
	require.Len(t, l.all, maxLost-1)
	require.Same(t, &all[4], l.all[1])
}

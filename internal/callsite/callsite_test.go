package callsite_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/callsite"
)

func TestEachSiteIsStoredOnce(t *testing.T) {
	var sites [2]callsite.Site
	for i := range sites {
		sites[i] = callsite.Here()
	}
	other := callsite.Here()
	require.Equal(t, sites[0], sites[1])
	require.NotEqual(t, sites[0], other)
	require.Regexp(t, `TestEachSiteIsStoredOnce \(\S+callsite_test\.go:14\)$`, sites[0].String())
	require.Regexp(t, `callsite_test\.go:16\)$`, other.String())
	require.True(t, callsite.Site(0).IsZero())
	require.Equal(t, "unknown", callsite.Site(0).String())
	require.Zero(t, testing.AllocsPerRun(100, func() { callsite.Here() }))
}

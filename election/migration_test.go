package election_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// Tokens can continue those of a fenced lock, as docs/guides/migration.md describes.
func TestTokensContinueThoseOfALock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for range 3 {
			require.NoError(t, c.FencedLock("boss lock").Do(t.Context(), func(context.Context) error { return nil }))
		}
		last, err := testserver.Query(s.Addr, "GET", wire.FencingToken("boss lock"))
		require.NoError(t, err)
		require.Equal(t, []string{"3"}, last)
		harness.Do(t, s.Addr, "HSET", wire.ElectionTerm(name), "token", last[0])
		nobodyLeads(t, c)
		term := campaign(t, c, "")
		require.EqualValues(t, 4, term.Token())
		leads(t, c, term)
		resign(t, term)
		harness.Do(t, s.Addr, "DEL", wire.FencingToken("boss lock"))
		onlyTokensLeft(t, s)
	})
}

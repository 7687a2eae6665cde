package replies_test

import (
	"math"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

func TestDecode(t *testing.T) {
	type row struct {
		script string
		valid  bool
	}
	number := func(r rueidis.RedisResult) error {
		_, err := wire.Number(r, wire.Range{Least: -1, Most: 3})
		return err
	}
	numbers := func(r rueidis.RedisResult) error {
		_, err := wire.Numbers(r, 4, wire.Flags, wire.Range{Least: 5, Most: math.MaxInt64})
		return err
	}
	list := func(r rueidis.RedisResult) error {
		parts, err := wire.List(r, 1, 2)
		if err == nil {
			_, err = wire.Text(parts[0])
		}
		return err
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		for name, test := range map[string]struct {
			decode func(rueidis.RedisResult) error
			rows   []row
		}{
			"number": {number, []row{
				{"return 3", true}, {"return -1", true}, {"return 4", false}, {"return -2", false},
				{"return '3'", false}, {"return {3}", false}, {"return {ok = '3'}", false}, {"return false", false},
			}},
			"numbers": {numbers, []row{
				{"return {0, 5, 1, 6}", true}, {"return {0, 5, 1}", false}, {"return {0, 5, 1, 6, 0}", false},
				{"return {2, 5, 1, 6}", false}, {"return {0, 1, 1, 6}", false}, {"return {0, '5', 1, 6}", false},
				{"return {0, 5, {1}, 6}", false}, {"return {0, 5, {err = 'WRONGTYPE'}, 6}", false}, {"return 4", false}, {"return {}", false},
			}},
			"list": {list, []row{
				{"return {'x'}", true}, {"return {'', {}}", true}, {"return {}", false}, {"return {1}", false},
				{"return {'x', 1, 1}", false}, {"return {{'x'}}", false}, {"return {false, 1}", false}, {"return 'x'", false},
			}},
		} {
			for _, row := range test.rows {
				err := test.decode(conn.Do(t.Context(), conn.B().Eval().Script(row.script).Numkeys(0).Build()))
				require.Equal(t, row.valid, err == nil, "%s: %s: %v", name, row.script, err)
				require.Equal(t, !row.valid, wire.IsUnknown(err), "%s: %s", name, row.script)
			}
			err := test.decode(conn.Do(t.Context(), conn.B().Eval().Script("return redis.error_reply('WRONGTYPE x')").Numkeys(0).Build()))
			require.True(t, wire.IsWrongType(err), name)
		}
	})
}

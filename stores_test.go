package redlatch_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestCellsOfStoresHaveTests verifies that the pages have the same table, one with what each store has and one with the
// tests, which are in the module of the store. A cell that says no needs none.
func TestCellsOfStoresHaveTests(t *testing.T) {
	t.Parallel()
	modules := []string{"", "contrib/etcd/", "contrib/zookeeper/", "contrib/postgres/", "contrib/postgres/"}
	sources := filesNamed(t, "_test.go")
	has := func(module, test string) bool {
		for path, source := range sources {
			in := strings.HasPrefix(path, module) && (module != "" || !strings.HasPrefix(path, "contrib/"))
			if in && strings.Contains(source, "\nfunc "+test+"(") {
				return true
			}
		}
		return false
	}

	documents := filesNamed(t, ".md")
	stores := tableBelow(documents["docs/guides/choosing.md"], "## What each store has")
	tests := tableBelow(documents["docs/internals/testing.md"], "### Other stores")
	require.Greater(t, len(stores), 10)
	require.Len(t, tests, len(stores))
	require.Equal(t, stores[0], tests[0], "the stores")
	name := regexp.MustCompile("`(Test\\w+)`")
	for i, row := range stores[2:] {
		of := tests[2+i]
		require.Equal(t, row[0], of[0])
		for j, module := range modules {
			named := name.FindAllStringSubmatch(of[1+j], -1)
			assert.True(t, len(named) > 0 || row[1+j] == "no", "%s, %s: no tests", row[0], stores[0][1+j])
			for _, m := range named {
				assert.True(t, has(module, m[1]), "%s, %s: no test %s", row[0], stores[0][1+j], m[1])
			}
		}
	}
}

// tableBelow returns the cells of the first table below a heading.
func tableBelow(text, heading string) (rows [][]string) {
	_, text, _ = strings.Cut(text, "\n"+heading+"\n")
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "|") {
			if len(rows) > 0 {
				break
			}
			continue
		}
		cells := strings.Split(strings.TrimSpace(line), "|")
		cells = cells[1 : len(cells)-1]
		for i, cell := range cells {
			cells[i] = strings.TrimSpace(cell)
		}
		rows = append(rows, cells)
	}
	return rows
}

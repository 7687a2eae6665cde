package redlatch_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDocumentsNameTests verifies that every test named in a document exists.
func TestDocumentsNameTests(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	var documents []string
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			documents = append(documents, path)
		}
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(source, -1) {
			tests[string(m[1])] = true
		}
		return err
	}))
	require.Subset(t, documents, []string{"docs/design-notes.md", "docs/testing.md"})
	names := regexp.MustCompile("`(Test\\w+)`")
	for _, document := range documents {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, m := range names.FindAllSubmatch(text, -1) {
			assert.True(t, tests[string(m[1])], "%s: no test %s", document, m[1])
		}
	}
}

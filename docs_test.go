package redlatch_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// filesNamed returns the contents of all files of the repository whose names end like that, by
// their slash-separated paths.
func filesNamed(t *testing.T, end string) map[string]string {
	t.Helper()
	files := map[string]string{}
	require.NoError(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == ".git" || entry.Name() == "target"): // Maven's output
			return filepath.SkipDir
		case !strings.HasSuffix(path, end):
			return nil
		}
		text, err := os.ReadFile(path)
		files[filepath.ToSlash(path)] = string(text)
		return err
	}))
	return files
}

// TestDocumentsNameTests verifies that every test named in a document exists.
func TestDocumentsNameTests(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, source := range filesNamed(t, "_test.go") {
		for _, m := range declared.FindAllStringSubmatch(source, -1) {
			tests[m[1]] = true
		}
	}
	documents := filesNamed(t, ".md")
	require.Contains(t, documents, "docs/internals/design-notes.md")
	require.Contains(t, documents, "docs/internals/testing.md")
	names := regexp.MustCompile("`(Test\\w+)`")
	for document, text := range documents {
		for _, m := range names.FindAllStringSubmatch(text, -1) {
			assert.True(t, tests[m[1]], "%s: no test %s", document, m[1])
		}
	}
}

// TestInternalsNameIdentifiers verifies that every Go identifier in the pages for maintainers is declared in
// the code. A qualified one belongs to a package or to a type.
func TestInternalsNameIdentifiers(t *testing.T) {
	t.Parallel()
	declared := identifiers(t)
	require.True(t, declared["Queues.Acquire"] && declared["engine.Queues"] && declared["claim.noHandOff"] && !declared["claim.none"])

	found := 0
	name := regexp.MustCompile("`([a-zA-Z]+\\.[A-Za-z]+|[A-Za-z]*(?:[a-z][A-Z]|[A-Z][a-z])[A-Za-z]*)`")
	other := regexp.MustCompile(`^Test|\.(go|lua|md|work)$`)
	for document, text := range filesNamed(t, ".md") {
		if !strings.HasPrefix(document, "docs/internals/") || document == "docs/internals/driver-report.md" { // of rueidis
			continue
		}
		for _, m := range name.FindAllStringSubmatch(text, -1) {
			if !other.MatchString(m[1]) {
				found++
				assert.True(t, declared[m[1]], "%s: no %s is declared", document, m[1])
			}
		}
	}
	assert.Greater(t, found, 150)
}

// identifiers returns what the packages of this module declare, also qualified by the package and by the
// type.
func identifiers(t *testing.T) map[string]bool {
	t.Helper()
	declared := map[string]bool{}
	for path, source := range filesNamed(t, ".go") {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, source, 0)
		require.NoError(t, err)
		declare := func(id *ast.Ident, of string) {
			declared[id.Name], declared[file.Name.Name+"."+id.Name], declared[of+"."+id.Name] = true, true, true
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				declare(n.Name, receiver(n))
			case *ast.ValueSpec:
				for _, name := range n.Names {
					declare(name, "")
				}
			case *ast.TypeSpec:
				declare(n.Name, "")
				ast.Inspect(n.Type, func(inner ast.Node) bool {
					if field, ok := inner.(*ast.Field); ok {
						for _, name := range field.Names {
							declare(name, n.Name.Name)
						}
					}
					return true
				})
			case *ast.Field: // a parameter
				for _, name := range n.Names {
					declare(name, "")
				}
			}
			return true
		})
	}
	return declared
}

// receiver returns the name of the type of a method, "" for a function.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	of := f.Recv.List[0].Type
	if pointer, ok := of.(*ast.StarExpr); ok {
		of = pointer.X
	}
	if generic, ok := of.(*ast.IndexExpr); ok {
		of = generic.X
	}
	name, _ := of.(*ast.Ident)
	if name == nil {
		return ""
	}
	return name.Name
}

// TestDocumentsNameFiles verifies that every document or example that Go code, a script or a
// document names by its path exists.
func TestDocumentsNameFiles(t *testing.T) {
	t.Parallel()
	path := regexp.MustCompile(`(?:^|[\s(\x60"])((?:docs|examples)/[\w/.-]*\w)`)
	found := 0
	for _, end := range []string{".go", ".md", ".lua", "Makefile", "tier"} {
		for file, text := range filesNamed(t, end) {
			for _, m := range path.FindAllStringSubmatch(text, -1) {
				found++
				_, err := os.Stat(m[1])
				_, errBeside := os.Stat(filepath.Join(filepath.Dir(file), m[1]))
				assert.False(t, err != nil && errBeside != nil, "%s: there is no %s", file, m[1])
			}
		}
	}
	assert.Greater(t, found, 10)
}

var (
	fenced     = regexp.MustCompile("(?ms)^```.*?^```$")
	inlineCode = regexp.MustCompile("`[^`]*`")
	link       = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading    = regexp.MustCompile(`(?m)^#+ (.*)$`)
)

// TestDocumentLinks verifies that every relative link of a document leads to a file of the
// repository and, if it has an anchor, to a heading of that file.
func TestDocumentLinks(t *testing.T) {
	t.Parallel()
	documents := filesNamed(t, ".md")
	found := 0
	for document, text := range documents {
		text = inlineCode.ReplaceAllString(fenced.ReplaceAllString(text, ""), "")
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			found++
			target, anchor, anchored := strings.Cut(m[1], "#")
			path := document
			if target != "" {
				path = filepath.ToSlash(filepath.Join(filepath.Dir(document), target))
			}
			if _, err := os.Stat(path); !assert.NoError(t, err, "%s: %s", document, m[1]) || !anchored {
				continue
			}
			assert.Contains(t, anchors(documents[path]), anchor, "%s: %s", document, m[1])
		}
	}
	assert.Greater(t, found, 30)
}

// anchors returns the anchors that GitHub gives to the headings of a document.
func anchors(text string) []string {
	var all []string
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		all = append(all, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, m[1]))
	}
	return all
}

// TestProgramIsTheSameEverywhere verifies that the functions that the guide shows are those that the modules test.
func TestProgramIsTheSameEverywhere(t *testing.T) {
	t.Parallel()
	sources := filesNamed(t, "program_test.go")
	guide := filesNamed(t, ".md")["docs/guides/choosing.md"]
	function := regexp.MustCompile(`(?ms)^func (run|on\w+)\(.*?^}$`)
	found := 0
	for _, f := range function.FindAllStringSubmatch(guide, -1) {
		found++
		in := 0
		for _, source := range sources {
			if strings.Contains(source, "\n"+f[0]+"\n") {
				in++
			}
		}
		want := 1
		if f[1] == "run" {
			want = len(sources)
		}
		assert.Equal(t, want, in, "files that have %s as the guide does", f[1])
	}
	require.Equal(t, 1+len(sources), found, "run, and a function for each store")
}

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

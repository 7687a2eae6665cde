package redlatch_test

import (
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// importable are the packages that a snippet without imports may use, by their names: those of each module. It
// has to build with the oldest Go of this module.
var importable = map[string]map[string]string{
	".": {
		"context": "context", "errors": "errors", "fmt": "fmt", "log": "log", "slog": "log/slog",
		"http": "net/http", "os": "os", "signal": "os/signal", "sync": "sync", "sql": "database/sql",
		"synctest": "testing/synctest", "syscall": "syscall", "testing": "testing", "time": "time",
		"rueidis": "github.com/redis/rueidis", "trace": "go.opentelemetry.io/otel/trace", "metric": "go.opentelemetry.io/otel/metric",
		"redlatch": "github.com/redlatch/redlatch", "redlatchtest": "github.com/redlatch/redlatch/redlatchtest",
		"lock": "github.com/redlatch/redlatch/lock", "pubsub": "github.com/redlatch/redlatch/pubsub",
		"countdown": "github.com/redlatch/redlatch/countdown", "election": "github.com/redlatch/redlatch/election",
		"fairlock": "github.com/redlatch/redlatch/fairlock", "multilock": "github.com/redlatch/redlatch/multilock",
		"once": "github.com/redlatch/redlatch/once", "rlock": "github.com/redlatch/redlatch/rlock",
		"rwlock": "github.com/redlatch/redlatch/rwlock", "semaphore": "github.com/redlatch/redlatch/semaphore",
		"ratelimit": "github.com/redlatch/redlatch/ratelimit",
		"grouplock": "github.com/redlatch/redlatch/grouplock", "locktest": "github.com/redlatch/redlatch/lock/locktest",
	},
	"contrib/httplimit": {"httplimit": "github.com/redlatch/redlatch/contrib/httplimit"},
	"contrib/httplock":  {"httplock": "github.com/redlatch/redlatch/contrib/httplock"},
	"contrib/etcd":      {"etcdlock": "github.com/redlatch/redlatch/contrib/etcd", "clientv3": "go.etcd.io/etcd/client/v3"},
	"contrib/zookeeper": {"zklock": "github.com/redlatch/redlatch/contrib/zookeeper", "zk": "github.com/go-zookeeper/zk"},
	"contrib/postgres":  {"pglock": "github.com/redlatch/redlatch/contrib/postgres", "pgxpool": "github.com/jackc/pgx/v5/pgxpool"},
}

// snippet is a Go block of a document.
type snippet struct {
	place string // "file:line" of its first line
	text  string
}

var goBlock = regexp.MustCompile("(?ms)^```go\n(.*?)^```$")

func snippetsOf(document, text string) []snippet {
	var all []snippet
	for _, m := range goBlock.FindAllStringSubmatchIndex(text, -1) {
		line := 1 + strings.Count(text[:m[2]], "\n")
		all = append(all, snippet{fmt.Sprintf("%s:%d", document, line), text[m[2]:m[3]]})
	}
	return all
}

// checker type-checks snippets. Packages are imported from the build cache.
type checker struct {
	files    *token.FileSet
	importer types.Importer
	paths    map[string]string // of the importable packages
	prelude  string            // declares the names that all snippets may use
}

func newChecker(t *testing.T, prelude string) *checker {
	t.Helper()
	list := []string{"list", "-export", "-f", "{{.ImportPath}}={{.Export}}"}
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		list = append(list, "-race") // the packages of this program are in the cache
	}
	paths, exports := map[string]string{}, map[string]string{}
	for module, packages := range importable {
		maps.Copy(paths, packages)
		cmd := exec.Command("go", slices.Concat(list, slices.Sorted(maps.Values(packages)))...)
		cmd.Dir = module
		if module != "." {
			cmd.Env = append(os.Environ(), "GOWORK=") // the module's own, which finds the library here
		}
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		require.NoError(t, err)
		for line := range strings.Lines(string(out)) {
			path, file, _ := strings.Cut(strings.TrimSpace(line), "=")
			exports[path] = file
		}
	}
	files := token.NewFileSet()
	return &checker{files: files, paths: paths, prelude: prelude, importer: importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("package %s is not one of those for snippets", path)
		}
		return os.Open(exports[path])
	})}
}

// check returns the first error of a snippet: a complete program, declarations or statements.
func (c *checker) check(s snippet) error {
	line := "//line " + s.place + "\n"
	if program, err := c.parse(line + s.text); err == nil {
		return c.compile(program)
	}
	file, err := c.parse("package snippet\n" + line + s.text)
	if err != nil {
		file, err = c.parse("package snippet\nfunc _() error {\n" + line + s.text + "\nreturn nil\n}\n")
	}
	if err != nil {
		return err
	}
	c.addImports(file)
	prelude, err := c.parse("package snippet\n" + c.prelude)
	if err != nil {
		return err
	}
	c.addImports(prelude)
	return c.compile(prelude, file)
}

func (c *checker) parse(text string) (*ast.File, error) {
	return parser.ParseFile(c.files, "", text, parser.SkipObjectResolution)
}

func (c *checker) compile(files ...*ast.File) error {
	conf := types.Config{Importer: c.importer, GoVersion: "go1.25"}
	_, err := conf.Check("snippet", c.files, files, nil)
	return err
}

// addImports imports the packages that file uses, unless it has imports of its own.
func (c *checker) addImports(file *ast.File) {
	if len(file.Imports) > 0 {
		return
	}
	used := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if selector, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := selector.X.(*ast.Ident); ok && c.paths[x.Name] != "" {
				used[c.paths[x.Name]] = true
			}
		}
		return true
	})
	block := &ast.GenDecl{Tok: token.IMPORT}
	for path := range used {
		spec := &ast.ImportSpec{Path: &ast.BasicLit{Kind: token.STRING, Value: `"` + path + `"`}}
		block.Specs, file.Imports = append(block.Specs, spec), append(file.Imports, spec)
	}
	file.Decls = append([]ast.Decl{block}, file.Decls...)
}

// TestDocumentSnippets verifies that every Go block of a document compiles. The first block of
// docs/README.md declares the names that the others use.
func TestDocumentSnippets(t *testing.T) {
	t.Parallel()
	documents := filesNamed(t, ".md")
	index := snippetsOf("docs/README.md", documents["docs/README.md"])
	require.NotEmpty(t, index)
	c := newChecker(t, index[0].text)
	checked, programs := 0, 0
	for document, text := range documents {
		for _, s := range snippetsOf(document, text) {
			if s == index[0] {
				continue
			}
			checked++
			if strings.HasPrefix(s.text, "package main\n") {
				programs++
			}
			if err := c.check(s); err != nil {
				t.Errorf("%v, in the block at %s", err, s.place)
			}
		}
	}
	require.Greater(t, checked, 15)
	require.Positive(t, programs)
}

// Snippets that do not compile are reported, with their place.
func TestBrokenSnippetsAreDetected(t *testing.T) {
	t.Parallel()
	c := newChecker(t, "var ctx context.Context\nvar client *redlatch.Client\n")
	for text, want := range map[string]string{
		"_ = client.Lock(7)\n": "x.md:7",
		"\n\nhold, err := client.Lock(\"a\").Lock(ctx)\n_ = err\n": "x.md:9: declared and not used: hold",
		"return 7\n":               "x.md:7",
		"if {\n":                   "x.md:7",
		"func f() { nowhere() }\n": "undefined: nowhere",
		"package main\n\nimport \"os\"\n\nfunc main() {}\n":      "x.md:9: \"os\" imported and not used",
		"fmt.Println(client.Locks)\n":                            "client.Locks undefined",
		"import \"golang.org/x/nowhere\"\nvar _ = nowhere.Now\n": "could not import",
	} {
		require.ErrorContains(t, c.check(snippet{"x.md:7", text}), want, text)
	}
	for _, text := range []string{
		"return client.Lock(\"a\").Do(ctx, func(ctx context.Context) error { return ctx.Err() })\n",
		"func f() error { return client.Ping(ctx) }\n",
		"package main\n\nfunc main() {}\n",
	} {
		require.NoError(t, c.check(snippet{"x.md:7", text}), text)
	}
}

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/redlatchtest"
)

var day = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

// isolate has git commands of this test read no configuration of the machine.
func isolate(t *testing.T) {
	t.Helper()
	for name, value := range map[string]string{
		"GIT_CONFIG_GLOBAL": os.DevNull, "GIT_CONFIG_NOSYSTEM": "1",
		"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.com",
		"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.com",
	} {
		t.Setenv(name, value)
	}
}

// must returns what a program prints.
func must(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	out, err := output(t.Context(), dir, env, name, args...)
	require.NoError(t, err)
	return out
}

// repository returns a new repository with these files in one commit.
func repository(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	must(t, root, nil, "git", "init", "-q", "-b", "main")
	for name, text := range files {
		write(t, filepath.Join(root, name), text)
	}
	must(t, root, nil, "git", "add", "--all")
	must(t, root, nil, "git", "commit", "-q", "-m", "All of it")
	return root
}

func write(t *testing.T, file, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
}

// state is all that a release changes in a repository.
func state(t *testing.T, root string) string {
	t.Helper()
	return must(t, root, nil, "git", "for-each-ref") + must(t, root, nil, "git", "status", "--porcelain") +
		must(t, root, nil, "git", "worktree", "list")
}

// small is a library with a command that builds, or not.
func small(command string) map[string]string {
	const requires = "\n\ngo 1.25.0\n\nrequire " + library + " v0.0.0\n"
	return map[string]string{
		"CHANGELOG.md":        "# Changelog\n\n## [Unreleased]\n\n- All.\n",
		"go.mod":              "module " + library + "\n\ngo 1.25.0\n",
		"lock.go":             "package redlatch\n\nfunc Lock() {}\n",
		"contrib/cron/go.mod": "module " + library + "/contrib/cron" + requires,
		"contrib/cron/go.sum": "",
		"contrib/cron/a.go":   "package cron\n\nimport \"" + library + "\"\n\nfunc init() { redlatch.Lock() }\n",
		"cmd/redlatch/go.mod": "module " + library + "/cmd/redlatch" + requires,
		"cmd/redlatch/go.sum": library + " v0.0.0 h1:old\n",
		"cmd/redlatch/a.go":   "package main\n\nimport \"" + library + "\"\n\nfunc main() { " + command + " }\n",
		"benchmarks/go.mod":   "module " + library + "/benchmarks" + requires + "\nreplace " + library + " => ../\n",
	}
}

// A release is one commit, and a tag of it for each published module.
func TestCommitAndTags(t *testing.T) {
	isolate(t)
	root := repository(t, small("redlatch.Lock()"))
	first := release{root: root, version: "v0.1.0-rc.1", today: day}
	require.NoError(t, first.make(t.Context()))
	require.Equal(t, []module{".", "contrib/cron", "cmd/redlatch"}, first.modules)

	require.Equal(t, "2", must(t, root, nil, "git", "rev-list", "--count", "HEAD"))
	require.Equal(t, "Release v0.1.0-rc.1", must(t, root, nil, "git", "log", "-1", "--format=%s"))
	require.Equal(t, "CHANGELOG.md\ncmd/redlatch/go.mod\ncmd/redlatch/go.sum\ncontrib/cron/go.mod\ncontrib/cron/go.sum",
		must(t, root, nil, "git", "diff", "--name-only", "HEAD~1"))
	require.Equal(t, "cmd/redlatch/v0.1.0-rc.1\ncontrib/cron/v0.1.0-rc.1\nv0.1.0-rc.1",
		must(t, root, nil, "git", "tag", "--list", "--points-at", "HEAD"))
	require.Empty(t, must(t, root, nil, "git", "status", "--porcelain"))
	require.Equal(t, "refs/heads/main", must(t, root, nil, "git", "symbolic-ref", "HEAD"))

	text, err := os.ReadFile(filepath.Join(root, "CHANGELOG.md"))
	require.NoError(t, err)
	require.Equal(t, "# Changelog\n\n## [Unreleased]\n\n## [0.1.0-rc.1] - 2026-11-29\n\n- All.\n", string(text))
	sums, err := os.ReadFile(filepath.Join(root, "cmd/redlatch/go.sum"))
	require.NoError(t, err)
	require.Regexp(t, `^\S+ v0\.1\.0-rc\.1 h1:\S+\n\S+ v0\.1\.0-rc\.1/go\.mod h1:\S+\n$`, string(sums))

	// The next release has a section already.
	write(t, filepath.Join(root, "CHANGELOG.md"), "# Changelog\n\n## [0.1.0] - 2026-12-01\n\n- All.\n")
	must(t, root, nil, "git", "commit", "-q", "--all", "-m", "Changes")
	next := release{root: root, version: "v0.1.0", today: day}
	require.NoError(t, next.make(t.Context()))
	require.NotContains(t, must(t, root, nil, "git", "diff", "--name-only", "HEAD~1"), "CHANGELOG.md")
	require.NotContains(t, must(t, root, nil, "git", "show", "HEAD:cmd/redlatch/go.sum"), "rc.1")
}

// A release that cannot be made changes nothing.
func TestRefused(t *testing.T) {
	isolate(t)
	for _, row := range []struct {
		name, version, want string
		change              func(t *testing.T, root string)
	}{
		{"no version", "", "must be a semantic version", nil},
		{"no v", "0.1.0", "must be a semantic version", nil},
		{"leading zero", "v0.01.0", "must be a semantic version", nil},
		{"leading zero of a pre-release", "v0.1.0-rc.01", "must be a semantic version", nil},
		{"build metadata", "v0.1.0+7", "must be a semantic version", nil},
		{"another module path", "v2.0.0", "must be a semantic version", nil},
		{"not clean", "v0.1.0", "the tree is not clean", func(t *testing.T, root string) { write(t, filepath.Join(root, "new.go"), "package redlatch\n") }},
		{"tagged", "v0.1.0", "the tag contrib/cron/v0.1.0 is there", func(t *testing.T, root string) { must(t, root, nil, "git", "tag", "contrib/cron/v0.1.0") }},
		{"replaced", "v0.1.0", "contrib/cron/go.mod has a replace directive", func(t *testing.T, root string) {
			must(t, filepath.Join(root, "contrib/cron"), nil, "go", "mod", "edit", "-replace", library+"=../..")
			must(t, root, nil, "git", "commit", "-q", "--all", "-m", "Replace")
		}},
		{"no changes", "v0.1.0", "nothing in the section [Unreleased]", func(t *testing.T, root string) {
			write(t, filepath.Join(root, "CHANGELOG.md"), "# Changelog\n\n## [Unreleased]\n\n## [0.0.9]\n\n- All.\n")
			must(t, root, nil, "git", "commit", "-q", "--all", "-m", "Changes")
		}},
		{"no section", "v0.1.0", "neither a section [0.1.0] nor [Unreleased]", func(t *testing.T, root string) {
			write(t, filepath.Join(root, "CHANGELOG.md"), "# Changelog\n")
			must(t, root, nil, "git", "commit", "-q", "--all", "-m", "Changes")
		}},
		{"does not build", "v0.1.0", "undefined: redlatch.Unlock", func(t *testing.T, root string) {
			write(t, filepath.Join(root, "cmd/redlatch/a.go"), small("redlatch.Unlock()")["cmd/redlatch/a.go"])
			must(t, root, nil, "git", "commit", "-q", "--all", "-m", "Break")
		}},
		{"no tags", "v0.1.0", "cannot lock ref", func(t *testing.T, root string) { // beside a folder of that name
			write(t, filepath.Join(root, ".git/refs/tags/cmd"), must(t, root, nil, "git", "rev-parse", "HEAD")+"\n")
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			root := repository(t, small("redlatch.Lock()"))
			if row.change != nil {
				row.change(t, root)
			}
			before := state(t, root)
			r := release{root: root, version: row.version, today: day}
			require.ErrorContains(t, r.make(t.Context()), row.want)
			require.Equal(t, before, state(t, root))
		})
	}
}

// What a release publishes can be used by others: the command, the adapters and the program of the README.
func TestRelease(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds all modules: make release-test")
	}
	root := workingTree(t)
	isolate(t)
	t.Setenv("GOSUMDB", "off") // so that the module cache is enough
	const version = "v0.1.0-rc.77"
	r := release{root: root, version: version, today: day}
	require.NoError(t, r.make(t.Context()))
	env := consumer(t, r)

	t.Run("command", func(t *testing.T) {
		bin := t.TempDir()
		must(t, bin, append(env, "GOBIN="+bin), "go", "install", library+"/cmd/redlatch@"+version)
		require.Contains(t, must(t, bin, nil, filepath.Join(bin, "redlatch"), "version"), version)
	})
	t.Run("binaries", func(t *testing.T) { testBinaries(t, r) })
	t.Run("adapters", func(t *testing.T) {
		dir := program(t, env, adapters)
		get := []string{"get"}
		for _, m := range r.modules {
			if strings.HasPrefix(string(m), "contrib/") {
				require.Contains(t, adapters, m.path())
				get = append(get, m.path()+"@"+version)
			}
		}
		must(t, dir, env, "go", get...)
		must(t, dir, env, "go", "build", ".")
	})
	t.Run("README", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(root, "README.md"))
		require.NoError(t, err)
		block := regexp.MustCompile("(?ms)^```go\n(package main\n.*?)^```$").FindStringSubmatch(string(text))
		require.NotNil(t, block)
		address := regexp.MustCompile(`redis://[\w.]+:6379`)
		require.Regexp(t, address, block[1])

		dir := program(t, env, address.ReplaceAllString(block[1], redlatchtest.NewServer(t).URL()))
		must(t, dir, env, "go", "get", library+"@"+version)
		must(t, dir, env, "go", "build", "-o", "program", ".")
		prints := regexp.MustCompile(`fmt\.Println\("(.*?)"`).FindStringSubmatch(block[1])
		require.NotNil(t, prints)
		require.Contains(t, must(t, dir, nil, filepath.Join(dir, "program")), prints[1])

		// Users get the modules that they compile, and nothing that only tests need.
		sums, err := os.ReadFile(filepath.Join(dir, "go.sum"))
		require.NoError(t, err)
		compiled := strings.Fields(must(t, dir, env, "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "."))
		for line := range strings.Lines(string(sums)) {
			path, _, _ := strings.Cut(line, " ")
			require.Contains(t, compiled, path)
		}
	})
}

// testBinaries builds the programs of a release twice. They must be the same, and know their version and commit.
func testBinaries(t *testing.T, r release) {
	platform, name := runtime.GOOS+"/"+runtime.GOARCH, "redlatch_0.1.0-rc.77_"+runtime.GOOS+"_"+runtime.GOARCH
	commit := must(t, r.root, nil, "git", "rev-parse", "HEAD")
	var sums []string
	for _, dir := range []string{t.TempDir(), t.TempDir()} {
		b := binaries{root: r.root, version: r.version, dir: dir}
		require.NoError(t, b.build(t.Context(), platform))
		text, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
		require.NoError(t, err)
		sums = append(sums, string(text))

		must(t, dir, nil, "sha256sum", "--check", "--strict", "SHA256SUMS")
		bill, err := os.ReadFile(filepath.Join(dir, name+".cdx.json"))
		require.NoError(t, err)
		require.Contains(t, string(bill), "pkg:golang/github.com/redis/rueidis@v")
		require.Contains(t, string(bill), "pkg:golang/"+library+"@"+r.version)
		must(t, dir, nil, "tar", "xzf", name+".tar.gz")
		for _, file := range []string{"LICENSE", "CHANGELOG.md", "man/redlatch-lock.1", "completions/redlatch.bash", "completions/_redlatch"} {
			require.FileExists(t, filepath.Join(dir, name, file))
		}
		require.Equal(t, "redlatch "+r.version+" "+commit+" "+runtime.Version()+" "+platform,
			must(t, dir, nil, filepath.Join(dir, name, "redlatch"), "version"))
	}
	require.Equal(t, sums[0], sums[1])
}

// Archives have the files of a folder, with nothing of this machine but their contents.
func TestArchives(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "redlatch_0.1.0_windows_amd64")
	write(t, filepath.Join(folder, "redlatch.exe"), "program")
	write(t, filepath.Join(folder, "man", "redlatch.1"), "page")
	require.NoError(t, os.Chmod(filepath.Join(folder, "redlatch.exe"), 0o700))

	var zipped, tarred bytes.Buffer
	require.NoError(t, packZip(&zipped, folder, day))
	require.NoError(t, packTar(&tarred, folder, day))
	archive, err := zip.NewReader(bytes.NewReader(zipped.Bytes()), int64(zipped.Len()))
	require.NoError(t, err)
	var files []string
	for _, file := range archive.File {
		require.True(t, file.Modified.Equal(day))
		files = append(files, fmt.Sprintf("%s %o", file.Name, file.Mode()))
	}
	require.Equal(t, []string{filepath.Base(folder) + "/man/redlatch.1 644", filepath.Base(folder) + "/redlatch.exe 755"}, files)

	uncompressed, err := gzip.NewReader(&tarred)
	require.NoError(t, err)
	files = nil
	for reader := tar.NewReader(uncompressed); ; {
		header, err := reader.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		require.True(t, header.ModTime.Equal(day))
		require.Empty(t, header.Uname)
		files = append(files, fmt.Sprintf("%s %o", header.Name, header.Mode))
	}
	require.Equal(t, []string{filepath.Base(folder) + "/man/redlatch.1 644", filepath.Base(folder) + "/redlatch.exe 755"}, files)
}

// workingTree returns a new repository with the files of this one, as they are now.
func workingTree(t *testing.T) string {
	t.Helper()
	// In a container the files may belong to a user that git does not trust.
	here := must(t, ".", nil, "git", "-c", "safe.directory=*", "rev-parse", "--show-toplevel")
	names := must(t, here, nil, "git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	files := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(names, "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(here, name))
		if os.IsNotExist(err) {
			continue
		}
		require.NoError(t, err)
		files[name] = string(text)
	}
	files["CHANGELOG.md"] = small("")["CHANGELOG.md"] // that of a release that was just made has no changes
	return repository(t, files)
}

// consumer returns the environment of a user who gets the modules of a release from a proxy, which the go command
// has filled from the tags.
func consumer(t *testing.T, r release) []string {
	t.Helper()
	proxy := t.TempDir()
	env, err := direct(t.Context(), r.root, proxy)
	require.NoError(t, err)
	for _, m := range r.modules {
		must(t, proxy, env, "go", "mod", "download", m.path()+"@"+r.version)
	}
	env, err = outside(t.Context(), t.TempDir(), fileProxy(proxy))
	require.NoError(t, err)
	return env
}

// program returns the folder of a new module with this program.
func program(t *testing.T, env []string, text string) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "main.go"), text)
	must(t, dir, env, "go", "mod", "init", "example.com/program")
	return dir
}

// adapters is a program that uses each adapter.
const adapters = `package main

import (
	"context"
	"log"
	"net/http"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/go-zookeeper/zk"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/robfig/cron/v3"
	clientv3 "go.etcd.io/etcd/client/v3"

	redlatchcron "github.com/redlatch/redlatch/contrib/cron"
	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	redlatchgocron "github.com/redlatch/redlatch/contrib/gocron"
	"github.com/redlatch/redlatch/contrib/goredis"
	"github.com/redlatch/redlatch/contrib/httplimit"
	"github.com/redlatch/redlatch/contrib/httplock"
	pglock "github.com/redlatch/redlatch/contrib/postgres"
	zklock "github.com/redlatch/redlatch/contrib/zookeeper"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

func main() {
	ctx := context.Background()
	client, err := goredis.Open(ctx, &redis.Options{Addr: "localhost:6379"})
	check(err)
	defer client.Close()

	locked, err := httplock.New(httplock.Config{
		Locker: func(name string) lock.Locker { return client.Lock(name) },
		Key:    func(r *http.Request) string { return r.URL.Path },
	})
	check(err)
	limited, err := httplimit.New(httplimit.Config{
		Limiter: func(name string) *ratelimit.Limiter { return client.RateLimiter(name, ratelimit.Rate(10, time.Second)) },
		Key:     func(r *http.Request) string { return r.RemoteAddr },
	})
	check(err)
	http.Handle("/", limited(locked(http.NotFoundHandler())))

	locker, err := redlatchgocron.NewLocker(client, time.Minute)
	check(err)
	_, err = gocron.NewScheduler(gocron.WithDistributedLocker(locker))
	check(err)
	_, err = redlatchcron.Add(cron.New(), "@hourly", client.Once("report"), func(context.Context) error { return nil })
	check(err)

	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{"localhost:2379"}})
	check(err)
	pool, err := pgxpool.New(ctx, "postgres://localhost")
	check(err)
	session := zklock.NewSession(nil)
	conn, _, err := zk.Connect([]string{"localhost"}, 10*time.Second, zk.WithDialer(session.Dial))
	check(err)
	onEtcd, err := etcdlock.New(ctx, etcd)
	check(err)
	onPostgres, err := pglock.NewTable(ctx, pool)
	check(err)
	onZooKeeper, err := zklock.New(ctx, conn, session)
	check(err)
	for _, l := range []lock.Locker{onEtcd.Lock("report"), onPostgres.Lock("report"), onZooKeeper.Lock("report")} {
		check(l.Do(ctx, func(context.Context) error { return nil }))
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
`

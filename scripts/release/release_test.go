package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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

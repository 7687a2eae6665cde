package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// release is the making of a release.
type release struct {
	root    string // of the repository
	version string
	today   time.Time

	modules []module
}

// make makes the commit and the tags. Everything happens in a worktree and in a copy of the repository, and
// the branch and the tags change at the very end. So a step that fails leaves the repository as it was.
func (r *release) make(ctx context.Context) error {
	if err := r.check(ctx); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "redlatch-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	tree := filepath.Join(work, "tree")
	if _, err := r.git(ctx, "worktree", "add", "-q", "--detach", tree, "HEAD"); err != nil {
		return err
	}
	defer r.git(context.WithoutCancel(ctx), "worktree", "remove", "--force", tree) //nolint:errcheck // it is a folder in work

	if err := r.setVersion(ctx, tree); err != nil {
		return err
	}
	if err := r.setSums(ctx, tree, work); err != nil {
		return err
	}
	if _, err := output(ctx, tree, nil, "git", "commit", "-q", "--all", "-m", "Release "+r.version); err != nil {
		return err
	}
	commit, err := output(ctx, tree, nil, "git", "rev-parse", "HEAD")
	if err != nil {
		return err
	}
	return r.finish(ctx, commit)
}

// semantic is a semantic version without build metadata, which the go command would not keep. Version 2
// would be another module path.
var semantic = regexp.MustCompile(`^v[01]\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?$`)

// check returns an error if the release cannot be made from what is there.
func (r *release) check(ctx context.Context) error {
	if !semantic.MatchString(r.version) {
		return fmt.Errorf("%q: must be a semantic version such as v0.1.0 or v0.1.0-rc.1, below v2", r.version)
	}
	changes, err := r.git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" {
		return fmt.Errorf("the tree is not clean: commit or remove these files\n%s", changes)
	}

	if r.modules, err = published(r.root); err != nil {
		return err
	}
	for _, m := range r.modules {
		tag, err := r.git(ctx, "tag", "--list", m.tag(r.version))
		if err != nil {
			return err
		}
		if tag != "" {
			return fmt.Errorf("the tag %s is there: a version that is published cannot change, so take the next one", tag)
		}
		file, err := os.ReadFile(filepath.Join(r.root, string(m), "go.mod"))
		if err != nil {
			return err
		}
		if replaces.Match(file) {
			return fmt.Errorf("%s/go.mod has a replace directive: move it to go.work, because users cannot install the module", m)
		}
	}
	return nil
}

var replaces = regexp.MustCompile(`(?m)^replace\b`)

// setVersion dates the section of the changelog, and has the modules require this version of the library.
func (r *release) setVersion(ctx context.Context, tree string) error {
	file := filepath.Join(tree, "CHANGELOG.md")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	changelog, err := dated(string(text), strings.TrimPrefix(r.version, "v"), r.today)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, []byte(changelog), 0o644); err != nil {
		return err
	}

	for _, m := range r.modules[1:] {
		dir := filepath.Join(tree, string(m))
		if _, err := output(ctx, dir, nil, "go", "mod", "edit", "-require", library+"@"+r.version); err != nil {
			return err
		}
		if err := dropSums(filepath.Join(dir, "go.sum")); err != nil {
			return err
		}
	}
	return nil
}

// dropSums removes the checksums of the library's last version from a file.
func dropSums(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	lines := slices.DeleteFunc(strings.SplitAfter(string(text), "\n"), func(line string) bool {
		return strings.HasPrefix(line, library+" ")
	})
	return os.WriteFile(file, []byte(strings.Join(lines, "")), 0o644)
}

const unreleased = "## [Unreleased]\n"

// dated returns the changelog with a section of the version: its own one, or else that of the unreleased
// changes, below a new and empty one.
func dated(changelog, version string, today time.Time) (string, error) {
	if strings.Contains(changelog, "\n## ["+version+"]") {
		return changelog, nil
	}
	before, after, found := strings.Cut(changelog, "\n"+unreleased)
	if !found {
		return "", fmt.Errorf("CHANGELOG.md has neither a section [%s] nor [Unreleased]", version)
	}
	changes, _, _ := strings.Cut(after, "\n## [")
	if strings.TrimSpace(changes) == "" {
		return "", errors.New("CHANGELOG.md: there is nothing in the section [Unreleased]")
	}
	return fmt.Sprintf("%s\n%s\n## [%s] - %s\n%s", before, unreleased, version, today.Format(time.DateOnly), after), nil
}

// setSums completes the go.sum files of the modules with the checksums of the library, and builds each module
// with that library, as its users do. The library has no file of another module, so its checksums are known
// before the commit is.
func (r *release) setSums(ctx context.Context, tree, work string) error {
	commit, err := snapshot(ctx, tree)
	if err != nil {
		return err
	}
	repository := filepath.Join(work, "repository")
	if _, err := output(ctx, tree, nil, "git", "clone", "-q", "--bare", r.root, repository); err != nil {
		return err
	}
	if _, err := output(ctx, tree, nil, "git", "push", "-q", "--no-verify", repository, commit+":refs/tags/"+r.version); err != nil {
		return err
	}
	env, err := direct(ctx, repository, filepath.Join(work, "modules"))
	if err != nil {
		return err
	}
	for _, m := range r.modules[1:] {
		dir := filepath.Join(tree, string(m))
		// "go mod tidy" would also look for modules that only tests of dependencies need.
		if _, err := output(ctx, dir, env, "go", "list", "-mod=mod", "-deps", "-test", "./..."); err != nil {
			return err
		}
		if _, err := output(ctx, dir, env, "go", "build", "./..."); err != nil {
			return err
		}
	}
	return nil
}

// snapshot returns a commit of the files of a tree, which no branch has and no hook sees.
func snapshot(ctx context.Context, tree string) (string, error) {
	if _, err := output(ctx, tree, nil, "git", "add", "--update"); err != nil {
		return "", err
	}
	files, err := output(ctx, tree, nil, "git", "write-tree")
	if err != nil {
		return "", err
	}
	return output(ctx, tree, nil, "git", "commit-tree", files, "-p", "HEAD", "-m", "To be released")
}

// finish tags the commit and moves the branch to it, or does neither.
func (r *release) finish(ctx context.Context, commit string) (err error) {
	var tags []string
	defer func() {
		if err != nil && len(tags) > 0 {
			_, _ = r.git(context.WithoutCancel(ctx), append([]string{"tag", "--delete"}, tags...)...)
		}
	}()
	for _, m := range r.modules {
		tag := m.tag(r.version)
		if _, err := r.git(ctx, "tag", "--annotate", "-m", m.path()+" "+r.version, tag, commit); err != nil {
			return err
		}
		tags = append(tags, tag)
	}
	_, err = r.git(ctx, "merge", "-q", "--ff-only", commit)
	return err
}

func (r *release) git(ctx context.Context, args ...string) (string, error) {
	return output(ctx, r.root, nil, "git", args...)
}

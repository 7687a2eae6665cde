package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// tree is a private copy of the working tree, in which one mutant at a time is tried.
type tree struct {
	root string
	tmp  string // files left by tests
}

// newTree copies the working tree at root: the files that git tracks or does not ignore.
func newTree(root, dir string) (*tree, error) {
	t := &tree{root: filepath.Join(dir, "tree"), tmp: filepath.Join(dir, "tmp")}
	if err := os.MkdirAll(t.tmp, 0o755); err != nil {
		return nil, err
	}
	git := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	git.Dir = root
	files, err := git.Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	for file := range strings.SplitSeq(strings.TrimSuffix(string(files), "\x00"), "\x00") {
		from, to := filepath.Join(root, file), filepath.Join(t.root, file)
		info, err := os.Stat(from)
		if errors.Is(err, os.ErrNotExist) || err == nil && info.IsDir() { // deleted and not committed, or another repository
			continue
		}
		src, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(to, src, info.Mode().Perm()); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// with runs fn while a file of the tree has another text.
func (t *tree) with(file string, text []byte, fn func() error) error {
	path := filepath.Join(t.root, file)
	was, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return err
	}
	return errors.Join(fn(), os.WriteFile(path, was, 0o644))
}

// undefined matches a finding of luacheck about an undefined name.
var undefined = regexp.MustCompile(`\(W11[23]\)`)

// compiles reports whether the tree's mutant compiles. A Lua mutant must not use undefined
// names.
func (t *tree) compiles(ctx context.Context, m mutant) (bool, error) {
	cmd := exec.CommandContext(ctx, "go", "build", "./"+m.dir())
	lua := strings.HasSuffix(m.file, ".lua")
	if lua {
		cmd = exec.CommandContext(ctx, "luacheck", "--no-color", "--quiet", "--codes", m.file)
	}
	cmd.Dir = t.root
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return false, err
	}
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	if lua {
		return cmd.ProcessState.ExitCode() < 2 && !undefined.Match(out), nil
	}
	if exit != nil && !bytes.Contains(exit.Stderr, []byte(filepath.Base(m.file))) {
		return false, fmt.Errorf("%s: go build: %s", m.id(), exit.Stderr) // not the mutant's fault
	}
	return exit == nil, nil
}

// hasTests reports whether a package has any.
func (t *tree) hasTests(pkg string) bool {
	files, err := filepath.Glob(filepath.Join(t.root, pkg, "*_test.go"))
	return err == nil && len(files) > 0
}

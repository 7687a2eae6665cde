package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// library is the path of the module that all others require.
const library = "github.com/redlatch/redlatch"

// module is a published module: the folder of its go.mod file, "." for the library.
type module string

func (m module) path() string { return path.Join(library, string(m)) }

// tag returns the name by which the go command looks for a version of the module.
func (m module) tag(version string) string { return path.Join(string(m), version) }

// published returns the modules of a tree that are published, in an order in which none comes before one that
// it requires. The others, such as benchmarks, are for contributors only.
func published(tree string) ([]module, error) {
	modules := []module{"."}
	for _, pattern := range []string{"contrib/*/go.mod", "cmd/*/go.mod"} {
		files, err := filepath.Glob(filepath.Join(tree, pattern))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			dir, err := filepath.Rel(tree, filepath.Dir(file))
			if err != nil {
				return nil, err
			}
			modules = append(modules, module(filepath.ToSlash(dir)))
		}
	}
	return modules, nil
}

// direct returns the environment of a go command that gets our modules from the tags of a local repository, in
// the way in which a proxy gets them from the public one, and keeps them in a module cache of its own. Other
// modules come from the machine's module cache, or else from where they always come from.
func direct(ctx context.Context, repository, cache string) ([]string, error) {
	env, err := outside(ctx, cache)
	if err != nil {
		return nil, err
	}
	return append(env,
		"GONOPROXY="+library,
		"GONOSUMDB="+library, // a checksum database may not know a version before it is published
		"GIT_CONFIG_COUNT=1",
		"GIT_CONFIG_KEY_0=url.file://"+filepath.ToSlash(repository)+".insteadOf",
		"GIT_CONFIG_VALUE_0=https://"+library,
	), nil
}

// outside returns the environment of a go command outside of this repository, with a module cache of its own
// and the proxies that come before those of the machine. It builds with -trimpath, so that a package is in the
// build cache whatever the folder of its module.
func outside(ctx context.Context, cache string, proxies ...string) ([]string, error) {
	known, err := output(ctx, ".", nil, "go", "env", "GOMODCACHE", "GOPROXY")
	if err != nil {
		return nil, err
	}
	modules, configured, _ := strings.Cut(known, "\n")
	proxies = append(proxies, fileProxy(modules), configured)
	return append(os.Environ(),
		"GOWORK=off",
		"GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -modcacherw -trimpath"),
		"GOMODCACHE="+cache,
		"GOPROXY="+strings.Join(proxies, ","),
		"CGO_ENABLED=0",
	), nil
}

// fileProxy returns the URL of the proxy that a module cache is as well.
func fileProxy(cache string) string {
	return "file://" + filepath.ToSlash(filepath.Join(cache, "cache", "download"))
}

// output runs a program and returns what it prints. Its error has what the program says.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, env
	var says strings.Builder
	cmd.Stderr = &says
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, out, says.String())
	}
	return strings.TrimSpace(string(out)), nil
}
